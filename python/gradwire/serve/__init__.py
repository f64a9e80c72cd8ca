"""An asynchronous parameter server: processes that hold a model's parameters, for replicas that
come and go.

    $ gradwire serve --shards 2 --store tcp://host:29400

    ps = gradwire.serve.connect(parameters, gradwire.serve.Adagrad(lr=0.02))
    ps.pull(parameters)
    ps.push(gradients)
"""

from gradwire.serve._client import ParameterServer, Pending, connect
from gradwire.serve._distributed_lbfgs import DistributedLBFGS
from gradwire.serve._lead import Progress
from gradwire.serve._reconnect import Dialling
from gradwire.serve._roles import Replica, role
from gradwire.serve._rules import SGD, Adagrad, Adam, Coordinated, Rounds, Rule
from gradwire.serve._server import Server

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Coordinated",
    "Dialling",
    "DistributedLBFGS",
    "ParameterServer",
    "Pending",
    "Progress",
    "Replica",
    "Rounds",
    "Rule",
    "Server",
    "connect",
    "role",
]
