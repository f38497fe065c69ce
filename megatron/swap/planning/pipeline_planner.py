"""Plans for the whole model: in each pipeline stage one rank solves for the stage's layers."""

from collections.abc import Callable

from megatron.swap.common.plan import Infeasible, Plan, merged
from megatron.swap.planner.profile import Profile
from megatron.swap.planner.solve import whole_layers
from megatron.swap.planner.state_fraction import solve_fractions
from megatron.swap.planning.consensus import Ranks


class PipelinePlanner:
    def __init__(self, ranks: Ranks, pipeline_rank: int, max_candidates: int) -> None:
        self._ranks = ranks
        self._pipeline_rank = pipeline_rank
        self._max_candidates = max_candidates
        self.leaders: dict[int, int] = {}  # stage → the rank that solves for it; empty before the first plans

    def whole_layers(self, profile: Callable[[], Profile], budget_gib: float) -> Plan | None:
        """Return this rank's plan that recomputes every layer whole, or None if such plans do not fit on all ranks."""
        of_ranks = self._ranks.gather(lambda: whole_layers(profile(), budget_gib))
        return None if None in of_ranks else of_ranks[self._ranks.rank]

    def plans(self, profile: Callable[[], Profile], budget_gib: float, reserve_gib: float | None) -> list[Plan]:
        """Return the best plans of the whole model within ``budget_gib`` of each device, the same on all ranks.

        ``profile`` returns this rank's; ``reserve_gib`` as in ``solve``. Raises ``Infeasible`` if a stage has no plan,
        its ``smallest_gib`` enough for all stages, and ``RankError`` if another rank failed in another way.
        """
        of_ranks = self._ranks.gather(lambda: (self._pipeline_rank, profile()))
        leaders: dict[int, int] = {}
        for rank, (stage, other) in enumerate(of_ranks):
            if stage not in leaders or other.saved_mib > of_ranks[leaders[stage]][1].saved_mib:
                leaders[stage] = rank  # in each stage the rank that saves most solves
        self.leaders = leaders
        mine = of_ranks[self._ranks.rank][1]

        def answer_of_stage() -> list[Plan] | tuple[str, float, float]:
            if leaders[self._pipeline_rank] != self._ranks.rank:
                return []
            reserve = reserve_gib if mine.layers else None  # a stage without layers has one plan
            # The profile itself leaves no more memory free, so no plan would be wider.
            if reserve is not None and reserve >= mine.reserves_gib[0]:
                return []
            try:
                return list(solve_fractions(mine, budget_gib, self._max_candidates, reserve).plans)
            except Infeasible as error:
                # The exception itself cannot be sent to other ranks.
                return str(error), error.smallest_gib, error.fragments_gib

        answers = self._ranks.gather(answer_of_stage)
        of_stages: list[list[Plan]] = []
        refusals: list[tuple[str, float, float]] = []
        for answer in (answers[leaders[stage]] for stage in sorted(leaders)):
            if isinstance(answer, tuple):
                refusals.append(answer)
            else:
                of_stages.append(answer)
        if refusals:
            raise Infeasible(*max(refusals, key=lambda refusal: refusal[1]))  # the largest is enough for all stages
        if not all(of_stages):
            return []
        most = max(len(plans) for plans in of_stages)
        return [merged([plans[min(i, len(plans) - 1)] for plans in of_stages]) for i in range(most)]
