"""Stands for the engine's CUDA kernels. Those that are called on the CPU have a body, plain and slow."""

from __future__ import annotations

import ctypes

import torch
from absent import stand_in  # type: ignore[import-not-found]

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    *_: object,
) -> None:
    """Write consecutive pieces of ``locations`` into ``table[row, start:end]``."""
    lengths = (ends - starts).tolist()
    pieces = torch.split(locations[: sum(lengths)], lengths)
    for row, start, piece in zip(rows.tolist(), starts.tolist(), pieces, strict=True):
        table[row, start : start + len(piece)] = piece.to(table.dtype)


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, *_: object
) -> None:
    """Read ``table[row, start:end]`` of all rows, one behind the other."""
    pieces = [
        table[row, start:end] for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    ]
    found = torch.cat(pieces)
    out[: len(found)] = found.to(out.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    _width: int,
    topk: int,
    steps: int,
) -> None:
    """Read the slots behind each request's tokens."""
    assign_extend_cache_locs_cpu(rows, table, lengths, lengths + topk * steps, out)


def build_tree_kernel_efficient_cpu(
    _parents: torch.Tensor,
    _scores: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    _depth: int,
    count: int,
    *_: object,
) -> None:
    """A tree that is a chain: one draft token behind the other."""
    if topk != 1:
        raise NotImplementedError("only chains of draft tokens")
    requests = len(lengths)
    steps = torch.arange(count)
    positions.copy_((lengths[:, None] + steps).flatten())
    index.copy_(steps + count * torch.arange(requests)[:, None])
    next_token.copy_(torch.where(steps < count - 1, steps + 1, -1).expand(requests, count))
    next_sibling.fill_(-1)
    mask.copy_(torch.ones(count, count, dtype=mask.dtype).tril().flatten().repeat(requests)[: mask.numel()])


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    target_predict: torch.Tensor,
    **_: object,
) -> None:
    """Accept the draft tokens of a chain up to the first that the target would not have chosen."""
    target = target_predict.reshape(candidates.shape)
    for request, drafted in enumerate(candidates.tolist()):
        accepted = 0
        while accepted + 1 < len(drafted) and drafted[accepted + 1] == target[request, accepted]:
            accepted += 1
        kept = retrive_index[request, : accepted + 1]
        accept_index[request, : accepted + 1] = kept.to(accept_index.dtype)
        predicts[kept.long()] = target[request, : accepted + 1].to(predicts.dtype)
        accept_token_num[request] = accepted


def copy_all_layer_kv_cache_cpu(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor, *_: object
) -> None:
    """Copy slots of every buffer, given by the addresses of the buffers and the bytes of a slot."""
    for base, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(base + source * stride, stride) for source in sources.tolist()]
        for target, slot in zip(targets.tolist(), held, strict=True):
            ctypes.memmove(base + target * stride, slot, stride)


def fill_bonus_tokens_cpu(tokens: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, width: int) -> None:
    """The last accepted token of every request."""
    last = torch.arange(len(lengths)) * width + lengths.long() - 1
    bonus[: len(lengths)] = tokens.flatten()[last].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(index: torch.Tensor, locations: torch.Tensor, out: torch.Tensor) -> None:
    """Locations of the accepted tokens, one behind the other."""
    kept = index.flatten()
    kept = kept[kept > -1].long()
    out[: len(kept)] = locations[kept].to(out.dtype)
