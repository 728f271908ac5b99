"""ComplexEMA measured: paths x lengths x dtypes, errors against fp64, share of the memory bound."""
