"""The built-in engine: continuous batching on the trainer's own model code.

`step()` admits waiting requests, prefills them, and decodes one token for every running sequence. It is synchronous and not
thread-safe: the server gives it a thread of its own. Nothing in it depends on timing: the same requests, submitted before the same
`step()`, give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prl.config.schema import InferenceConfig
from prl.inference.kv_cache import KVCache, Namespace
from prl.inference.sampling import SamplingTable, sample
from prl.inference.sequences import Request, Sequence
from prl.models.checkpoint import load_weights
from prl.models.moe import RoutingRecorder
from prl.models.qwen3 import Qwen3Model

MAX_PREFILL_TOKENS = 8192  # per step, so that one step's memory and latency stay bounded


@dataclass
class EngineStats:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found, by cache or shared within a group
    preemptions: int = 0
    finished: int = 0
    steps: int = 0


@dataclass
class _Rows:
    """The running sequences as tensors, rebuilt only when the set changes."""

    sequences: list[Sequence]
    slots: Tensor  # [B] int64
    positions: Tensor  # [B] int64: of the token to be forwarded next
    last_token: Tensor  # [B] int64
    table: SamplingTable
    num_slots: int  # slots [0, num_slots) hold all rows


class TorchEngine:
    def __init__(
        self, model: Qwen3Model, config: InferenceConfig, eos_token_ids: tuple[int, ...], version: str = "0"
    ) -> None:
        self.model, self.config, self.eos, self.version = model, config, eos_token_ids, version
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.cache = KVCache(model.card, config.max_num_seqs, config.max_model_len, self.dtype, self.device)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.rows: _Rows | None = None
        self.stats = EngineStats()
        self.has_weights = True

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request. Raises ValueError when its prompt leaves no room for a single token."""
        if not request.prompt_ids:
            raise ValueError("the prompt is empty")
        if len(request.prompt_ids) >= self.config.max_model_len:
            raise ValueError(
                f"the prompt has {len(request.prompt_ids)} tokens, but prompt and completion together "
                f"may have {self.config.max_model_len} (inference.max_model_len)"
            )
        if not all(0 <= token < self.model.card.vocab_size for token in request.prompt_ids):
            raise ValueError(f"token ids must be in [0, {self.model.card.vocab_size})")
        base = request.params.seed
        if base is None:
            base = int(torch.randint(0, 2**31, ()).item())
        sequences = [
            Sequence(request, i, seed=base + 0x51ED27 * i, token_ids=list(request.prompt_ids))
            for i in range(request.params.n)
        ]
        self.waiting += sequences
        return sequences

    def abort(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
                if sequence in self.running:
                    self._leave(sequence)
                else:
                    self.waiting.remove(sequence)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # --- weights and memory -------------------------------------------------------------------------------------------

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Overwrite the weights in place; call between steps. Running sequences keep their KV."""
        load_weights(self.model, tensors)
        self.has_weights = True

    def set_version(self, version: str) -> None:
        """Tokens sampled from now on carry this version, and only prefixes computed under it are shared."""
        self.version = version

    def reset_prefix_cache(self) -> None:
        """Forget every reusable prefix; running sequences are not touched."""
        self.cache.reset()

    def sleep(self, level: int) -> None:
        """Give memory back: KV cache, and weights (level 1: to CPU memory, level 2: dropped). Running sequences start over
        from their tokens after `wake_up`."""
        for sequence in list(self.running):
            self._leave(sequence)
            sequence.computed, sequence.routed = 0, []
            self.waiting.insert(0, sequence)
            self.stats.preemptions += 1
        self.cache.release()
        if level == 1:
            self.model.to("cpu")
        else:
            for param in self.model.parameters():
                param.data = torch.empty(0, dtype=param.dtype).expand(param.shape) if param.numel() == 0 else param.data[:0]
            self.has_weights = False

    def wake_up(self) -> None:
        if not self.has_weights:
            with torch.device(self.device):
                fresh = Qwen3Model(self.model.card).to(self.dtype)
            self.model = fresh.requires_grad_(False).eval()
        self.model.to(self.device)
        self.cache.allocate()

    # --- one step -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Prefill what fits, decode one token for all; returns the sequences that finished."""
        self.stats.steps += 1
        finished = self._prefill(self._admit()) if self.waiting and self.cache.num_free else []
        if self.running:
            finished += self._decode()
        self.stats.finished += len(finished)
        return finished

    def _namespace(self, sequence: Sequence) -> Namespace:
        return (self.version, sequence.request.cache_salt)

    def _admit(self) -> list[Sequence]:
        """Waiting sequences in order of priority, then arrival, as many as slots and the token budget allow."""
        self.waiting.sort(key=lambda s: (s.request.priority, s.request.arrival, s.index))
        admitted: list[Sequence] = []
        budget = MAX_PREFILL_TOKENS
        while self.waiting and self.cache.num_free:
            sequence = self.waiting[0]
            if admitted and len(sequence.token_ids) > budget:
                break
            self.waiting.pop(0)
            admitted.append(sequence)
            self._place(sequence)
            budget -= len(sequence.token_ids) - sequence.computed
        return admitted

    def _place(self, sequence: Sequence) -> None:
        """Give a sequence a slot, with as much of its KV as the prefix cache holds."""
        tokens = sequence.token_ids
        source, found = (-1, 0)
        # recorded routing of a cached prefix is not kept, so recording needs the whole prompt forwarded
        if self.config.prefix_caching and not self.config.return_routed_experts:
            source, found = self.cache.find(self._namespace(sequence), tokens[:-1])  # one token must be left to forward
        self.stats.prefix_queries += len(tokens)
        self.stats.prefix_hits += found
        if found:
            self.cache.touch(source)
        sequence.slot = self.cache.take(keep=source)
        if found and source != sequence.slot:
            self.cache.copy(source, sequence.slot, found)
        elif not found or source != sequence.slot:
            self.cache.file(sequence.slot, self._namespace(sequence), [])
        sequence.computed = found

    def _prefill(self, admitted: list[Sequence]) -> list[Sequence]:
        """Forward all new tokens of the admitted sequences, sample one token each."""
        leaders: dict[tuple[str, tuple[int, ...]], Sequence] = {}
        followers: list[tuple[Sequence, Sequence]] = []
        for sequence in admitted:
            key = (sequence.request.cache_salt, tuple(sequence.token_ids))
            leader = leaders.setdefault(key, sequence)
            if leader is not sequence:
                followers.append((sequence, leader))
        lead = list(leaders.values())
        logits = self._forward_prompts(lead)  # [leaders, V]
        row_of = {id(sequence): row for row, sequence in enumerate(lead)}
        for sequence, leader in followers:  # the same prompt is computed once and copied
            self.cache.copy(leader.slot, sequence.slot, len(leader.token_ids))
            self.stats.prefix_hits += len(leader.token_ids) - sequence.computed
            sequence.computed, sequence.routed = len(leader.token_ids), list(leader.routed)
            row_of[id(sequence)] = row_of[id(leader)]
        rows = torch.tensor([row_of[id(s)] for s in admitted], device=self.device)
        table = SamplingTable.build([s.request.params for s in admitted], [s.seed for s in admitted], self.eos, self.device)
        positions = torch.tensor([len(s.token_ids) for s in admitted], device=self.device)
        tokens, logprobs = sample(logits[rows], table, positions, [s.num_generated for s in admitted])
        self.stats.prompt_tokens += sum(s.num_prompt for s in admitted)
        self.running += admitted
        self.rows = None
        if self.config.prefix_caching:
            for sequence in admitted:  # findable by later requests while it runs
                self.cache.file(sequence.slot, self._namespace(sequence), list(sequence.token_ids))
        return self._collect(admitted, tokens.tolist(), logprobs.tolist())

    def _forward_prompts(self, sequences: list[Sequence]) -> Tensor:
        """Logits [B, V] after the last token of each sequence; fills their slots."""
        new = [s.token_ids[s.computed :] for s in sequences]
        lengths = [len(tokens) for tokens in new]
        longest, context = max(lengths), max(len(s.token_ids) for s in sequences)
        device = self.device
        input_ids = torch.tensor([t for tokens in new for t in tokens], device=device)
        positions = torch.tensor([p for s in sequences for p in range(s.computed, len(s.token_ids))], device=device)
        slots = torch.tensor([s.slot for s in sequences], device=device)
        row = torch.repeat_interleave(torch.arange(len(sequences), device=device), torch.tensor(lengths, device=device))
        starts = torch.tensor([s.computed for s in sequences], device=device)
        column = positions - starts[row]
        # query i of a row stands at position start + i and sees everything up to there
        query_positions = starts[:, None] + torch.arange(longest, device=device)[None, :]  # [B, T]
        mask = torch.arange(context, device=device)[None, None, :] <= query_positions[:, :, None]  # [B, T, S]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, slots[row], positions, k, v)
            padded = q.new_zeros(len(sequences), longest, *q.shape[1:])
            padded[row, column] = q
            keys, values = self.cache.k[layer][slots, :, :context], self.cache.v[layer][slots, :, :context]
            out = F.scaled_dot_product_attention(
                padded.transpose(1, 2), keys, values, attn_mask=mask[:, None], enable_gqa=q.shape[1] != k.shape[1]
            )
            return out.transpose(1, 2)[row, column]

        recorder = RoutingRecorder() if self.config.return_routed_experts else None
        hidden = self.model(input_ids, positions, attend, recorder=recorder)
        for sequence, piece in zip(sequences, self._recorded(recorder, lengths), strict=True):
            sequence.computed = len(sequence.token_ids)
            if piece is not None:
                sequence.routed = [piece]
        ends = torch.tensor(lengths, device=device).cumsum(0) - 1
        return self.model.logits(hidden[ends])

    def _recorded(self, recorder: RoutingRecorder | None, lengths: list[int]) -> list[np.ndarray | None]:
        if recorder is None or not recorder.experts:
            return [None] * len(lengths)
        pieces: list[np.ndarray | None] = []
        pieces += np.split(recorder.stacked().cpu().numpy(), np.cumsum(lengths)[:-1])
        return pieces

    def _build_rows(self) -> _Rows:
        self.running.sort(key=lambda s: s.slot)
        device, running = self.device, self.running
        return _Rows(
            sequences=list(running),
            slots=torch.tensor([s.slot for s in running], device=device),
            positions=torch.tensor([s.computed for s in running], device=device),
            last_token=torch.tensor([s.token_ids[-1] for s in running], device=device),
            table=SamplingTable.build([s.request.params for s in running], [s.seed for s in running], self.eos, device),
            num_slots=running[-1].slot + 1,
        )

    def _decode(self) -> list[Sequence]:
        """One token for every running sequence."""
        if self.rows is None:
            self.rows = self._build_rows()
        rows = self.rows
        context = max(s.computed for s in rows.sequences) + 1
        dense = rows.num_slots == len(rows.sequences)  # every slot up to the last is running: views instead of copies
        ends = rows.positions if dense else rows.positions.new_zeros(rows.num_slots).index_copy(0, rows.slots, rows.positions)
        mask = torch.where(torch.arange(context, device=self.device)[None, :] <= ends[:, None], 0.0, -torch.inf)
        mask = mask.to(self.dtype)[:, None, None, :]  # [slots, 1, 1, S]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, rows.slots, rows.positions, k, v)
            if not dense:
                q = q.new_zeros(rows.num_slots, *q.shape[1:]).index_copy(0, rows.slots, q)
            keys = self.cache.k[layer][: rows.num_slots, :, :context]  # [slots, Hkv, S, D]
            values = self.cache.v[layer][: rows.num_slots, :, :context]
            grouped = q.view(rows.num_slots, keys.shape[1], -1, q.shape[-1]) * q.shape[-1] ** -0.5  # [slots, Hkv, G, D]
            scores = grouped @ keys.transpose(-1, -2) + mask
            out = (scores.softmax(dim=-1) @ values).view(q.shape)
            return out if dense else out[rows.slots]

        recorder = RoutingRecorder() if self.config.return_routed_experts else None
        hidden = self.model(rows.last_token, rows.positions, attend, recorder=recorder)
        pieces = self._recorded(recorder, [1] * len(rows.sequences))
        generated = [s.num_generated for s in rows.sequences] if rows.table.banned else []
        rows.positions += 1
        tokens, logprobs = sample(self.model.logits(hidden), rows.table, rows.positions, generated)
        rows.last_token = tokens
        for sequence, piece in zip(rows.sequences, pieces, strict=True):
            sequence.computed += 1
            if piece is not None:
                sequence.routed.append(piece)
        return self._collect(rows.sequences, tokens.tolist(), logprobs.tolist())

    def _collect(self, sequences: list[Sequence], tokens: list[int], logprobs: list[float]) -> list[Sequence]:
        finished = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.append(token, logprob, self.version)
            sequence.check_finished(self.eos, self.config.max_model_len)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        self.stats.generation_tokens += len(tokens)
        for sequence in finished:
            self._leave(sequence)
        return finished

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.rows = None
        # KV computed under older weights is never shared: the namespace holds the version of the last token only
        pure = not sequence.versions or sequence.versions[0] == self.version
        cacheable = self.config.prefix_caching and pure
        known = sequence.token_ids[: sequence.computed]
        self.cache.give_back(sequence.slot, self._namespace(sequence), known, cacheable)
        sequence.slot = -1
