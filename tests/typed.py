"""What type checkers take, and what they must not: pyright and mypy check this file, and nothing runs it.

Each line that ends in an ignored error would be an error of its own if it were none.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

import torch
from torch import Tensor, nn

import fnddp
from fnddp import allgather, allreduce, bf16, bucketize, error_feedback, fp16, powersgd, quantize, sign, topk, two_shot

# Codecs stand around what carries payloads.
quantize(two_shot)
quantize(allgather, bits=4, rounding="stochastic")
quantize(two_shot(server_memory=True), block=None)
topk(quantize(allgather), ratio=0.01)
topk(bf16(allgather), ratio=0.01)
bucketize(sign(quantize(two_shot)))
fp16(quantize(two_shot))
quantize(fnddp.cast(two_shot, torch.bfloat16))
error_feedback(powersgd(bf16(allreduce), rank=4, orthogonalization="qr"))

quantize(allreduce)  # type: ignore[arg-type]
quantize(bf16(allreduce))  # type: ignore[arg-type]
sign(error_feedback(allreduce))  # type: ignore[arg-type]
topk(bucketize(two_shot), ratio=0.01)  # type: ignore[arg-type]
quantize(two_shot, bits=5)  # type: ignore[arg-type]
quantize(two_shot, rounding="up")  # type: ignore[arg-type]
sign(two_shot, scale="median")  # type: ignore[arg-type]
powersgd(allreduce, orthogonalization="svd")  # type: ignore[arg-type]
bf16(fp16)  # type: ignore[call-overload]
error_feedback("allreduce")  # type: ignore[arg-type]
quantize(two_shot, bit=4)  # type: ignore[call-arg]


# A step keeps the type of the gradients.
grads: dict[str, Tensor] = {"w": torch.ones(2)}
state = allreduce.init(grads)
mean, state = allreduce(grads, state)
as_given: dict[str, Tensor] = mean
other: list[Tensor] = mean  # type: ignore[assignment]

# Pipelines of a model, by value and as text.
model = fnddp.DistributedDataParallel(nn.Linear(2, 1), sync="auto")
model.sync = bucketize(quantize(two_shot))
fnddp.DistributedDataParallel(nn.Linear(2, 1), sync=8)  # type: ignore[arg-type]


# An own codec, and what it is given.
@fnddp.transform
class halved(fnddp.Codec):
    inner: fnddp.Carrying
    times: int = 1

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"": x / 2**self.times}

    def decode(self, payload: dict[str, Tensor], n: int) -> Tensor:
        return payload[""] * 2**self.times


halved(two_shot, times=2)
halved(allreduce)  # type: ignore[arg-type]
halved(two_shot, times="2")  # type: ignore[arg-type]

# Laws for a transform of one's own.
fnddp.laws.check(allreduce)
