"""How compiled code shows in a trace."""

# What runs a graph: Dynamo's region around it, and AOTAutograd's function in it, of backward too.
REGION = "Torch-Compiled Region"
COMPILED = (REGION, "CompiledFunction")
INDUCTOR = "## Call CompiledFxGraph"  # the range around the kernels of one
