"""The ranks of one worker group: the tensor-parallel group and the channel that carries Plans."""
