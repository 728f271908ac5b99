"""Facts about cards and their kernels: dense peaks, bandwidths, names, utilization. No torch."""
