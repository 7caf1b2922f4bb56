"""Run convolutions by a plan: called directly, in autograd, or in place of aten's operators."""
