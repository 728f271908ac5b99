"""Op benchmarks, one file each: a file that defines BENCH is a command `steplab bench NAME`."""
