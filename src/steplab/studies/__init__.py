"""Questions asked over a grid, whose answer is a table. `steplab bench NAME` runs one."""
