"""Faster forms of what a stranger's model computes, put into the compiler's graph of it.

A file with a `REWRITE` is one kind of substitution: it finds places in a graph that Dynamo has
traced and says what could stand there instead (`match.Match`), or why it leaves a place alone
(`match.Declined`). Nothing is believed: `proof.prove` runs both forms side by side before
`backend.substitute` changes the graph. A file with a `MODULE_REWRITE` changes how modules are
computed before anything is traced, where a library has a registry for that. Modules and the names
of their parameters stay as they are.
"""
