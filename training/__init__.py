"""What train.py is made of: a run and its state, the parts of a step, and what keeps both going."""
