"""Other people's machines: Colab's versions, Binder's files, newer Pythons. `make pins` runs them."""
