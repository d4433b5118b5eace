"""The built-in engine: continuous batching on the trainer's own model code.

`step()` admits waiting sequences, prefills them, and decodes one token for every running one. It is synchronous and not
thread-safe: the server gives it a thread of its own. Nothing in it depends on timing: the same requests, submitted
before the same `step()`, give the same bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from prl.config.schema import InferenceConfig
from prl.inference.forward import DecodeRows, PrefillRows, kernels_run, prefill, routing_pieces, sampling_table
from prl.inference.graphs import DecodeGraphs
from prl.inference.isolation import BrokenWeights, Isolation
from prl.inference.kv_cache import KVCache, Namespace
from prl.inference.sampling import (
    SamplingParams,
    SamplingTable,
    draw,
    kept_entries,
    log_distribution,
    sequence_seed,
)
from prl.inference.sequences import Request, Sequence
from prl.inference.sleeping_weights import SleepingWeights
from prl.models.checkpoints.reading import load_weights
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.decoder import Decoder

MAX_PREFILL_TOKENS = 8192  # per step, so that one step's memory and latency stay bounded
# to be prefilled in one pass with what is decoded: more of them are worth a pass, and a failure, of their own
TOKENS_BESIDE = 512


@dataclass
class EngineStats:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found, in the cache or shared within a group
    preemptions: int = 0
    steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish_reason


class TorchEngine:
    """One model on one device. `version` labels the weights; tokens carry it."""

    def __init__(
        self, model: Decoder, config: InferenceConfig, eos_token_ids: tuple[int, ...], version: str = "0"
    ) -> None:
        self.model, self.config, self.eos, self.version = model, config, eos_token_ids, version
        model.absorb_latents()  # the cache holds them
        weight = next(model.parameters())
        self.device, self.dtype, self.vocab = weight.device, weight.dtype, model.card.vocab_size
        self.cache = KVCache(model.card, config.max_num_seqs, config.max_model_len, self.dtype, self.device)
        self.cache.by_kernels &= kernels_run(self.cache, model.card.num_attention_heads)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.rows: DecodeRows | None = None
        self.graphs: DecodeGraphs | None = None
        self.stats = EngineStats()
        # the prefix cache never mixes KV of different epochs; that of requests without a salt rises with each change of
        # weights, the other one when all is to be forgotten: a salt says by itself which KV is good enough
        self.epoch = self.salted_epoch = 0
        self.has_weights = True
        self.sleeping = SleepingWeights(model, self.device)
        self.weights_awake = self.cache_awake = True
        self.isolation = Isolation(self, self.stats.finished)

    # --- requests -----------------------------------------------------------------------------------------------------

    def prepare(self, request: Request) -> list[Sequence]:
        """The request's n sequences, not yet queued; touches no state, so any thread may call it.

        Raises ValueError for prompts and stop tokens that this model cannot take.
        """
        prompt, params = request.prompt_ids, request.params
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) >= self.config.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, but the maximum context length, prompt and completion together, "
                f"is {self.config.max_model_len} (inference.max_model_len)"
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab:
            raise ValueError(f"token ids must be in [0, {self.vocab})")
        if not all(0 <= token < self.vocab for token in params.stop_token_ids):
            raise ValueError(f"stop_token_ids must be in [0, {self.vocab})")
        if params.min_tokens and len(params.stop_ids(self.eos)) >= self.vocab:
            raise ValueError("with min_tokens, some token must not be a stop token")
        seed = int(torch.randint(0, 1 << 31, ())) if params.seed is None else params.seed
        return [Sequence(request, i, sequence_seed(seed, i), list(prompt)) for i in range(params.n)]

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue prepared sequences."""
        self.waiting += sequences

    def abort(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """End those that have not finished, with reason "abort" and what they have so far; returns these.

        Prepared sequences that were never submitted end likewise.
        """
        aborted = [s for s in sequences if s.finish_reason is None]
        for sequence in aborted:
            sequence.finish_reason = "abort"
            self.stats.finished["abort"] += 1
            if sequence.slot >= 0:
                self._leave(sequence)
        self.waiting = [s for s in self.waiting if s.finish_reason is None]
        return aborted

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # --- weights and memory -------------------------------------------------------------------------------------------

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: str | None, keep_salted: bool = False) -> None:
        """Overwrite the weights in place, between steps. Running sequences keep their KV and go on. With `keep_salted`
        the next requests of a conversation that has a cache salt find what there is of it, whichever weights made it.

        Raises ValueError when the tensors are not this model's; there are no usable weights then until a load succeeds.
        """
        if not self.weights_awake:
            raise ValueError("the weights sleep: /wake_up?tags=weights before updating them")
        if keep_salted:
            self.cache.forget_unsalted()
            self.epoch += 1
        else:
            self.reset_prefix_cache()  # also makes slots, and so batches, those of an engine that just started
        try:
            load_weights(self.model, tensors)
        except ValueError:
            self.has_weights = False  # some tensors may have been copied before
            raise
        self.has_weights = True
        self.version = self.version if version is None else version

    def reset_prefix_cache(self) -> None:
        """Forget every reusable prefix, now and of those now running; these go on."""
        self.cache.reset()
        self.epoch += 1
        self.salted_epoch += 1

    def sleep(self, level: int) -> None:
        """Give memory back: the KV cache, and the weights (level 1: to host memory, level 2: dropped).

        Running sequences are computed anew from their tokens after `wake_up`.
        """
        for sequence in list(self.running):
            self._leave(sequence)
            sequence.start_over()
            self.waiting.append(sequence)
            self.stats.preemptions += 1
        if self.graphs is not None:
            self.graphs.forget()
        self.cache.release()
        self.has_weights &= level == 1
        self.sleeping.leave(keep=self.has_weights)  # those of a failed update, too, are worth nothing
        self.weights_awake = self.cache_awake = False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        """Take memory again, all or a part of it; weights dropped by level 2 are undefined until `load`."""
        if "weights" in tags and not self.weights_awake:
            self.sleeping.come_back()
            self.weights_awake = True
        if "kv_cache" in tags and not self.cache_awake:
            self.cache.allocate()
            self.cache_awake = True

    @property
    def awake(self) -> bool:
        return self.weights_awake and self.cache_awake

    # --- one step -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Prefill what fits, decode one token for all; returns the sequences that finished.

        What fails costs the sequences that fail alone, too (`isolation`); raises when that does not help.
        """
        assert self.awake
        assert self.has_weights
        self.stats.steps += 1
        finished: list[Sequence] = []
        admitted = self._admit() if self.waiting and self.cache.num_free else []
        if admitted and self.running and self._fit_beside(admitted):
            return self.isolation.run(lambda _: self._decode(admitted), [*self.running, *admitted])
        if admitted:
            finished += self.isolation.run(self._prefill, admitted)
        if self.running:
            finished += self.isolation.run(lambda _: self._decode([]), list(self.running))
        return finished

    def _fit_beside(self, admitted: list[Sequence]) -> bool:
        """Whether one pass may prefill these and decode the others: states and choices of keys are not written so."""
        tokens = sum(len(s.token_ids) - s.computed for s in admitted)
        return tokens <= TOKENS_BESIDE and not self.cache.states and not self.model.card.index_topk

    def advance_alone(self, sequence: Sequence) -> list[Sequence]:
        """Compute a sequence that is in no slot anew, and one more token of it. Returns it if that ends it."""
        with torch.inference_mode():
            self._place(sequence)
            return self._prefill([sequence])

    def evict(self, sequence: Sequence) -> None:
        """Out of its slot, if it has one, and nothing of its KV is kept."""
        if sequence in self.running:
            self.running.remove(sequence)
        self.rows = None
        if sequence.slot >= 0:
            self.cache.wipe(sequence.slot)
            self.cache.give_back(sequence.slot, self._namespace(sequence), [], False)
            sequence.slot = -1

    def probe(self) -> Exception | None:
        """What is wrong if not even one token after a prompt of one can be computed. Nobody sees that it was. Needs a
        free slot.
        """
        (sequence,) = self.prepare(Request("probe", [0], SamplingParams(seed=0, max_tokens=1)))
        sequence.slot = self.cache.take()
        try:
            logits, _ = prefill(self.model, self.cache, [sequence], None)
            table = sampling_table([sequence], self.eos, self.vocab, self.device)
            position = torch.ones(1, dtype=torch.int64, device=self.device)
            self._numbers(self._draw([sequence], logits, table, position)[1])
        except Exception as error:
            return error
        finally:
            self.evict(sequence)
        return None

    def _namespace(self, sequence: Sequence) -> Namespace:
        return (sequence.epoch, sequence.request.cache_salt)

    def _epoch_of(self, sequence: Sequence) -> int:
        return self.salted_epoch if sequence.request.cache_salt else self.epoch

    def _admit(self) -> list[Sequence]:
        """Waiting sequences in order of priority, then arrival, as many as slots and the token budget allow."""
        self.waiting.sort(key=lambda s: (s.request.priority, s.request.arrival, s.index))
        admitted: list[Sequence] = []
        budget = MAX_PREFILL_TOKENS
        for sequence in self.waiting[: self.cache.num_free]:
            if admitted and len(sequence.token_ids) > budget:
                break
            self._place(sequence)
            admitted.append(sequence)
            budget -= len(sequence.token_ids) - sequence.computed
        del self.waiting[: len(admitted)]
        return admitted

    def _place(self, sequence: Sequence) -> None:
        """Give a sequence a slot, with as much of its KV as the prefix cache holds."""
        sequence.epoch = self._epoch_of(sequence)
        tokens = sequence.token_ids
        source, found = (-1, 0)
        # routing and logits of cached tokens are not kept, so telling them takes forwarding the whole prompt
        tells_all = self.config.return_routed_experts or sequence.request.params.prompt_logprobs is not None
        if self.config.prefix_caching and not tells_all:
            source, found = self.cache.find(self._namespace(sequence), tokens[:-1])  # one must be left to forward
        self.stats.prefix_queries += len(tokens)
        self.stats.prefix_hits += found
        self.cache.touch(source)
        sequence.slot = self.cache.take(keep=source)
        if found and sequence.slot != source:
            self.cache.copy(source, sequence.slot, found)
        sequence.computed = found
        if not sequence.num_generated:  # not again after sleep
            sequence.cached = found

    def _prefill(self, admitted: list[Sequence]) -> list[Sequence]:
        """Forward all new tokens of the admitted sequences, sample one token each."""
        leads, of_leads = self._leads(admitted)
        logits, pieces = prefill(self.model, self.cache, leads, self._recorder())
        self._enter(admitted, leads, of_leads, pieces)
        table = sampling_table(admitted, self.eos, self.vocab, self.device)
        positions = torch.tensor([len(s.token_ids) for s in admitted], device=self.device)
        drawn = self._draw(admitted, logits[torch.tensor(of_leads, device=self.device)], table, positions)
        return self._collect(admitted, *drawn)

    def _leads(self, admitted: list[Sequence]) -> tuple[list[Sequence], list[int]]:
        """The same prompt is computed once, then copied: for whom, and whose is that of each."""
        row_of: dict[tuple[str, int | None, tuple[int, ...]], int] = {}
        leads: list[Sequence] = []
        of_leads: list[int] = []
        for sequence in admitted:
            params = sequence.request.params
            key = (sequence.request.cache_salt, params.prompt_logprobs, tuple(sequence.token_ids))
            if row_of.setdefault(key, len(leads)) == len(leads):
                leads.append(sequence)
            of_leads.append(row_of[key])
        return leads, of_leads

    def _enter(
        self, admitted: list[Sequence], leads: list[Sequence], of_leads: list[int], pieces: list[np.ndarray]
    ) -> None:
        """They have their KV, or that of their leads, and run."""
        for sequence, row in zip(admitted, of_leads, strict=True):
            self._complete_prefill(sequence, leads[row], pieces[row] if pieces else None)
        self.running += admitted
        self.rows = None

    def _complete_prefill(self, sequence: Sequence, leader: Sequence, routed: np.ndarray | None) -> None:
        length = len(sequence.token_ids)
        if sequence is not leader:
            self.cache.copy(leader.slot, sequence.slot, length)
            self.stats.prefix_hits += length - sequence.computed
        if not sequence.num_generated:
            self.stats.prompt_tokens += sequence.num_prompt
            sequence.cached = sequence.cached if sequence is leader else length
        sequence.computed = length
        sequence.prompt_logprobs = leader.prompt_logprobs
        if routed is not None:
            sequence.routed = [routed]
        if self.config.prefix_caching:  # findable by later requests while it runs
            self.cache.file_running(sequence.slot, self._namespace(sequence), list(sequence.token_ids))

    def _decode(self, admitted: list[Sequence]) -> list[Sequence]:
        """One token for every running sequence, and in the same pass the first one for those that are admitted."""
        if self.rows is None:
            self.rows = DecodeRows(self.running, self.eos, self.vocab, self.device)
        rows, recorder = self.rows, self._recorder()
        sequences, table, positions = rows.sequences, None, rows.positions
        if admitted:
            sequences = [*sequences, *admitted]
            leads, of_leads = self._leads(admitted)
            logits, pieces = rows.forward_beside(
                self.model, self.cache, PrefillRows(self.model, self.cache, leads), recorder
            )
            count = len(rows.sequences)
            self._enter(admitted, leads, of_leads, pieces[count:])
            logits = logits[torch.tensor([*range(count), *(count + row for row in of_leads)], device=self.device)]
            table = sampling_table(sequences, self.eos, self.vocab, self.device)
            ends = torch.tensor([len(s.token_ids) for s in admitted], device=self.device)
            positions = torch.cat([positions, ends])
        else:
            logits, pieces = self._forward(rows, recorder)
        tokens, logprobs = self._draw(sequences, logits, table or rows.table, positions)
        rows.advance(tokens[: len(rows.sequences)])
        for sequence, piece in zip(rows.sequences, pieces, strict=False):
            sequence.routed.append(piece)  # one piece each, or none at all
        return self._collect(sequences, tokens, logprobs)

    def _forward(self, rows: DecodeRows, recorder: RoutingRecorder | None) -> tuple[Tensor, list[np.ndarray]]:
        """Logits after the last token of each row, and its routing (none if not recorded)."""
        if DecodeGraphs.suit(self.cache):
            if self.graphs is None:
                self.graphs = DecodeGraphs(self.model, self.cache, self.config.return_routed_experts)
            return self.graphs.forward(rows)
        logits = rows.forward(self.model, self.cache, recorder)
        return logits, routing_pieces(recorder, [1] * len(rows.sequences), self.model.card)

    def _draw(
        self, sequences: list[Sequence], logits: Tensor, table: SamplingTable, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A token for each sequence and its log-probability, [B] each; who asked is told what it was drawn from."""
        distribution = log_distribution(logits, table, positions)
        if table.told:
            for row, ids in zip(table.told, kept_entries(distribution, table.told), strict=True):
                sequences[row].kept.append(ids)
        return draw(distribution, table, positions)

    def _recorder(self) -> RoutingRecorder | None:
        return RoutingRecorder() if self.config.return_routed_experts else None

    def _collect(self, sequences: list[Sequence], tokens: Tensor, logprobs: Tensor) -> list[Sequence]:
        """Append a drawn token to each sequence; those that end leave."""
        numbers = self._numbers(logprobs)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), numbers, strict=True):
            sequence.append(token, logprob, self.version)
            sequence.check_finished(self.eos, self.config.max_model_len)
        self.stats.generation_tokens += len(numbers)
        finished = [s for s in sequences if s.finish_reason is not None]
        for sequence in finished:
            self.stats.finished[sequence.finish_reason or ""] += 1
            self._leave(sequence)
        return finished

    def _numbers(self, logprobs: Tensor) -> list[float]:
        numbers = logprobs.tolist()
        if not all(map(math.isfinite, numbers)):
            raise BrokenWeights(f"the logits are not finite under weight version {self.version}")
        return numbers

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.rows = None
        # KV of tokens computed under older weights is shared under a salt alone
        cacheable = self.config.prefix_caching and sequence.epoch == self._epoch_of(sequence)
        known = sequence.token_ids[: sequence.computed]
        self.cache.give_back(sequence.slot, self._namespace(sequence), known, cacheable)
        sequence.slot = -1
