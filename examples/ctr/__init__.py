"""Parts of `examples/train_ctr.py`: the data, the model and the metrics of a click model."""
