"""The policy `default`: nothing measured. The rules, or a cost model that others' trials fitted."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.compiler.measure import Measurer
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.policy import DEFAULT, PREDICTED, Choice, SearchResult, SearchTask
from dovetail.compiler.search.space import WHOLE

PREDICTED_GAIN = 0.3
"""What a program must be predicted faster by than the rules' own to take its place: on records of
products that the model had not seen, smaller predicted gains were as often losses (measured)."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What `--effort none` and machines that are not at hand get.

    model: fitted to records of a like machine it chooses the micro-kernel; analytic, the rules do.
    """

    model: CostModel = field(default_factory=CostModel)

    def search(self, task: SearchTask, measurer: Measurer | None = None) -> SearchResult:
        """Return a program at each M, without a trial."""
        return SearchResult({m: self._choose(task, m) for m in task.points}, 0, 0.0)

    def _choose(self, task: SearchTask, m: int) -> Choice:
        rule = task.default(m)
        if self.model.correction is None:
            return Choice(rule, DEFAULT)
        programs = [task.program(m, t, WHOLE, rule.scheme) for t in task.problem(m).tiles()]
        (best,) = self.model.best(task, m, dict.fromkeys(programs), 1)
        expected, seconds = self.model.predict(task, m, (rule, best))
        if seconds > (1 - PREDICTED_GAIN) * expected:
            return Choice(rule, PREDICTED, expected)
        return Choice(best, PREDICTED, seconds)
