"""When to load and when to compute: costs that are measured as the engine runs, and breakers for a tier that fails."""

from tutti_mooncake.schedule.breaker import Breaker, BreakerState
from tutti_mooncake.schedule.load_cost import LOAD_COST, LinearCost, LoadCost

__all__ = ["LOAD_COST", "Breaker", "BreakerState", "LinearCost", "LoadCost"]
