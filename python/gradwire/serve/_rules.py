"""Update rules: how the servers apply a gradient that was pushed to their parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from gradwire._base import arguments
from gradwire._errors import InvalidArgument


@dataclass(frozen=True)
class Rule:
    """The base class of update rules; `lr` is the learning rate γ of each."""

    lr: float

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a number that no rule can have."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "bool":
                arguments.flag(value, each.name)
            elif arguments.number(value, each.name) < 0:
                raise InvalidArgument(f"{type(self).__name__}({each.name}={value}) is negative")

    @property
    def spec(self) -> str:
        """The rule in the words of the core, such as "adagrad:rate=0.02,epsilon=1e-10"."""
        options = (f"{_CORE_NAMES[each.name]}={self._text(each.name)}" for each in fields(self))
        return f"{type(self).__name__.lower()}:{','.join(options)}"

    def _text(self, name: str) -> str:
        value = getattr(self, name)
        return ("yes" if value else "no") if isinstance(value, bool) else repr(float(value))


@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent: w -= lr * g, with the bits of torch.optim.SGD.

    With momentum v = momentum * v + g, and w -= lr * v, or with `nesterov` lr * (g + momentum * v).
    With several replicas momentum adds to that which staleness brings: use less of it than in
    synchronous training, or none.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidArgument as every rule, and for `nesterov` without momentum."""
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise InvalidArgument("SGD(nesterov=True) needs a momentum=, such as 0.9")

    @property
    def spec(self) -> str:
        """The rule in the words of the core."""
        _, _, options = super().spec.partition(":")
        return f"momentum:{options}" if self.momentum else f"sgd:rate={self._text('lr')}"


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad: s += g * g; w -= lr * g / sqrt(s), where s begins at `eps`.

    The rule of Downpour SGD (Dean et al. 2012, "Large Scale Distributed Deep Networks", sec. 4.1):
    its rates, one for each parameter, are what keeps training with stale gradients stable.
    """

    eps: float = 1e-10


@dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma & Ba 2015, algorithm 1), with bias correction."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True)
class Rounds(Rule):
    """Rounds of pushes, each of which moves the parameters once: the rule of `elastic.DiLoCo`.

    A push is what a replica's own steps took away from its values, and its `lr` is its weight. The
    mean of a round's pushes, by weight, is the gradient of SGD with Nesterov momentum (Douillard et
    al. 2023, DiLoCo). A version is a round.

    A round ends when all replicas have pushed; or `grace` seconds after `quorum` of them have. A
    push from values of an earlier round is late: it counts in the open one, and neither for its
    quorum nor as what is waited for, unless it is the replica's second in it. A replica without
    which a round ended is not waited for, and makes no quorum wait, until it pushes again, nor is
    one that joined in the open round. A round that gets no quorum ends without it, and the server
    logs so, a minute or ten times `grace`, whichever is longer, after its first push in time.
    Weights are from 1e-30 to 1e30; others are refused with InvalidArgument.

    Of a server that is started again the open round's pushes are lost.
    """

    momentum: float = 0.9
    nesterov: bool = True
    quorum: int = 1
    grace: float = 10.0

    def __post_init__(self) -> None:
        """Raises InvalidArgument as every rule, and for a quorum that is none."""
        arguments.whole(self.quorum, "quorum", least=1)
        super().__post_init__()

    def _text(self, name: str) -> str:
        return str(self.quorum) if name == "quorum" else super()._text(name)


@dataclass(frozen=True)
class Coordinated(Rule):
    """No rule: a push is kept, under the name that it is given, until a coordinator folds it.

    The shards hold named vectors beside the parameters, on which a coordinator works by
    commands: the service of Sandblaster L-BFGS (Dean et al. 2012, sec. 4.2). A pull sees one
    version of the parameters.
    """

    lr: float = field(default=0.0, init=False, repr=False)

    @property
    def spec(self) -> str:
        """The rule in the words of the core."""
        return "staged"


_CORE_NAMES = {
    "lr": "rate",
    "momentum": "momentum",
    "nesterov": "nesterov",
    "eps": "epsilon",
    "beta1": "beta1",
    "beta2": "beta2",
    "quorum": "quorum",
    "grace": "grace",
}
