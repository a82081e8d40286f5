"""Result types: values by head, by layer and by pair, with addresses and files."""
