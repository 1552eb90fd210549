// placeholder until the next file lands
