"""What a step will cost on a card and on ranks that are not here: counted, modelled, remembered."""
