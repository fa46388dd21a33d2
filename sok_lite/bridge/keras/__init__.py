"""Tables in models of Keras 3 and tf_keras; neither is imported here."""
