"""SparseOperationKit's API: its words, argument checks and error texts on the bridge."""
