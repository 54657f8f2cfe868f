"""There, so that the package counts as one with an instruction set; `nki` itself puts it up."""
