"""What is done about Keras 3 and tf_keras: neither is imported here."""
