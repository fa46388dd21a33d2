"""TFPlus' KvVariable, by its names."""
