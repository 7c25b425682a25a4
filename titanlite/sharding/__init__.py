"""Derive a sharding plan: a few annotations determine the placement of every tensor, and every collective.

The model is exported on the meta device before anything is decomposed, so that a linear layer is one node. Placements
(replicate, shard of a dim, partial sum) spread from annotated weights first, then from annotated activations, forward
and backward until nothing changes. If a consumer needs another placement than the tensor has, a collective follows.
There is no search: costs only break ties, so a person can follow why a tensor has its placement.

Reading order: `plan` (what comes out), `annotations` (what goes in), `graph`, `rules` with `op_rules`, `reshape` and
`dtensor_rules` (which placements an operator can compute without communication), `propagate`, `derive` (the rule of
each operator, and the collectives), `check` (what is refused).

The semantics are those of nvFuser's sharding propagation (github.com/NVIDIA/Fuser, pull request 3838 and its
successors), the rounds are Shardy's user priorities (openxla.org/shardy/propagation).
"""
