"""Execution: run convolutions by a plan, eagerly, in autograd and in place of aten's own."""
