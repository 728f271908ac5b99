"""What low precision does to sums, to normalisations and to the tensors of a model.

`accumulation` adds small numbers, `normalisation` measures errors against fp64, `audit` lists
which dtypes autocast gives to the modules of a model.
"""
