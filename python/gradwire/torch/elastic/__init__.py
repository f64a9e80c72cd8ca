"""Training in which ranks come and go while the others go on, in the same processes.

A training loop::

    sampler = elastic.Sampler(len(x), batch=32, epochs=3)
    with elastic.session(model, optimizer, sampler) as s:
        for batch in s:
            s.backward(loss_of(model(x[batch]), y[batch]))
            if s.commit():
                optimizer.step()

`DiLoCo` is for slow networks: ranks average what many steps have made, and none waits for another.
"""

from gradwire.torch.elastic.diloco import DiLoCo
from gradwire.torch.elastic.sampling import Sampler
from gradwire.torch.elastic.session import Session, session

__all__ = ["DiLoCo", "Sampler", "Session", "session"]
