"""The allocations of one step: recorded, told apart by who holds them, added up over time."""
