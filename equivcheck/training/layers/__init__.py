"""What layers are made of: a folder for each kind of layer, with its facts and its module."""
