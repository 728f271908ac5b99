"""From the text of a trace file to columns, chunk by chunk; `steplab.trace.load` is the way in."""
