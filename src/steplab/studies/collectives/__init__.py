"""How long collectives take between ranks: `study.py` plans and records, `rank.py` measures.

`job.py`, `bandwidth.py`, `group.py`, `study.py` and `table.py` never import torch; `launch.py`,
`rank.py` and `message.py` run in processes of their own.
"""
