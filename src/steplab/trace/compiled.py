"""How compiled code shows in a trace, and what it saves of what is not compiled."""

# What runs a graph: Dynamo's region around it, and AOTAutograd's function in it, of backward too.
REGION = "Torch-Compiled Region"
COMPILED = (REGION, "CompiledFunction")
INDUCTOR = "## Call CompiledFxGraph"  # the range around the kernels of one
# What a compiler fuses, and the share of its time that this saves: 76 to 82 % in two models on an
# H200.
FUSIBLE = ("elementwise", "reduction", "copy", "normalization")
FUSED = 0.78
