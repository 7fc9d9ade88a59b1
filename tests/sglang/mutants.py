"""One-line breaks of what the plugin does with cached prefixes. Each must be found by a test of :data:`mutation.TESTS`."""

# ruff: noqa: E501  (the texts of the mutants are lines of other files)

from __future__ import annotations

from tests.simulation.mutant import Mutant

COMPACTION = "kvcached_dist/sglang/compaction.py"
LISTS = "kvcached_dist/sglang/lists.py"
BOOK = "kvcached_dist/sglang/book.py"
RUNTIME = "kvcached_dist/sglang/runtime.py"
PLUGIN = "kvcached_dist/sglang/plugin.py"
ENGINE = "kvcached_dist/sglang/engine.py"

UNBROKEN = Mutant("unbroken", "nothing", COMPACTION, "LEAST_SHARE = 16\n", "LEAST_SHARE = 16  # as it is\n")

MUTANTS = (
    # ------------------------------------------------------------------ the same bytes behind the same tokens
    Mutant(
        "rows-stay-where-they-were",
        "S3: a node names rows that were not copied",
        COMPACTION,
        "        self._copy(known.beside(_tokens(move.sources, size)), known.beside(_tokens(move.targets, size)))\n",
        "",
    ),
    Mutant(
        "only-the-first-buffer-is-copied",
        "S3: keys move and values do not",
        COMPACTION,
        "        for buffer in _buffers(pool):\n",
        "        for buffer in _buffers(pool)[:1]:\n",
    ),
    Mutant(
        "only-the-first-part-is-copied",
        "S3: what does not fit into one part is lost",
        COMPACTION,
        "        buffer.index_copy_(0, entered, buffer.index_select(0, left))\n",
        "        buffer.index_copy_(0, entered, buffer.index_select(0, left))\n        break\n",
    ),
    Mutant(
        "a-page-is-its-first-token",
        "S3: of a page of several tokens one moves",
        COMPACTION,
        "    return (blocks[:, None] * size + np.arange(size)).reshape(-1)\n",
        "    return (blocks[:, None] * size + 0 * np.arange(size)).reshape(-1)\n",
    ),
    Mutant(
        "nodes-are-told-before-the-copies",
        "S7: a copy that fails leaves nodes that name other rows",
        COMPACTION,
        "        self._copy(known.beside(_tokens(move.sources, size)), known.beside(_tokens(move.targets, size)))\n"
        "        for holder, part in zip(holders, parts, strict=True):\n"
        "            holder.value = part\n",
        "        for holder, part in zip(holders, parts, strict=True):\n"
        "            holder.value = part\n"
        "        self._copy(known.beside(_tokens(move.sources, size)), known.beside(_tokens(move.targets, size)))\n",
    ),
    # ------------------------------------------------------------------ only what nobody else uses
    Mutant(
        "moves-under-a-request",
        "S4: rows move while the engine works",
        COMPACTION,
        "        if not scheduler.is_fully_idle() or pending or cache.protected_size():\n",
        "        if pending or cache.protected_size():\n",
    ),
    Mutant(
        "moves-what-is-locked",
        "S4: rows move that somebody has locked",
        COMPACTION,
        "        if not scheduler.is_fully_idle() or pending or cache.protected_size():\n",
        "        if not scheduler.is_fully_idle() or pending:\n",
    ),
    Mutant(
        "ids-of-others-are-forgotten",
        "S6: ids that neither the list nor the cache holds are given to somebody",
        COMPACTION,
        "        return first if whole and known.book.are_all(np.concatenate((first // size, known.free_ids()))) else None\n",
        "        return first if whole else None\n",
    ),
    Mutant(
        "an-id-twice-is-as-good-as-two",
        "S6: a list with an id in it twice counts as whole",
        BOOK,
        "        return bool((np.bincount(ids, minlength=self._usable.size) == self._usable).all())\n",
        "        return bool(len(ids) == self._count)\n",
    ),
    Mutant(
        "moves-into-what-goes-with-drafts",
        "S3: the rows of a draft stay behind",
        COMPACTION,
        '        "speculative decoding": engine.context("spec").speculative_algorithm is not None,\n',
        "",
    ),
    Mutant(
        "moves-in-pipelines",
        "S4: a late stage still reads what moves",
        COMPACTION,
        "    if stages > 1 or set(lists) != {specs.FULL}:\n",
        "    if set(lists) != {specs.FULL}:\n",
    ),
    Mutant(
        "copies-before-the-last-batch-has-written",
        "S3: an engine whose stream of batches has another name is not waited for",
        COMPACTION,
        "            scheduler.forward_stream if on_a_card else None, self._holders(),\n",
        "            self._holders(),\n",
    ),
    # ------------------------------------------------------------------ equal on all ranks
    Mutant(
        "in-the-order-of-the-tree",
        "S5: where an id goes depends on the order in which a process walks its tree",
        COMPACTION,
        "    used = np.sort(used)\n",
        "",
    ),
    Mutant(
        "sessions-time-out-by-each-clock",
        "S5: a rank that has not looked for timeouts yet moves nothing, and the others do",
        COMPACTION,
        "        self._scheduler.session_controller.maybe_reap(time.monotonic(), interval=-1.0)\n",
        "",
    ),
    Mutant(
        "sessions-close-by-each-clock",
        "S5: a session that was closed under its request goes at another time on each rank",
        PLUGIN,
        "        close_sessions(scheduler.session_controller)\n",
        "",
    ),
    Mutant(
        "sessions-close-before-the-mark",
        "S5: a mark compares what rank 0 had before it closed a session",
        PLUGIN,
        "        for mark in marks:\n            self.runtime.apply(mark)\n",
        "        close_sessions(scheduler.session_controller)\n"
        "        for mark in marks:\n            self.runtime.apply(mark)\n",
    ),
    Mutant(
        "sessions-are-asked-while-they-run",
        "quantities: two lines of the engine's log in every step",
        ENGINE,
        "    if any(session.close_on_finish and not session._inflight for session in controller.sessions.values()):\n",
        "    if any(session.close_on_finish for session in controller.sessions.values()):\n",
    ),
    Mutant(
        "moves-are-not-compared",
        "S5: a rank that moves by itself is not found out",
        LISTS,
        "            self._moves = zlib.crc32(np.ascontiguousarray(ids).data, self._moves)\n",
        "            self._moves = 0\n",
    ),
    Mutant(
        "a-failure-is-kept-to-oneself",
        "S5: a rank goes on that could not move what the others have",
        RUNTIME,
        "            self.started.broken(\n"
        '                InvariantViolation("S5", f"{why} restart the engine, with more memory left on the card")\n'
        "            )\n",
        "            del why\n",
    ),
    Mutant(
        "at-any-eviction",
        "L: memory is short and a prompt waits for copies",
        RUNTIME,
        "        if any(isinstance(entry, Evict) and not entry.tokens for entry in entries):\n",
        "        if any(isinstance(entry, Evict) for entry in entries):\n",
    ),
    # ------------------------------------------------------------------ the list afterwards
    Mutant(
        "depths-are-of-the-order-before",
        "S6: a run counts as free by where its ids were",
        LISTS,
        "        self._census = self._coming = None\n\n    # ------------------------------------------------------------------ what enters\n",
        "\n    # ------------------------------------------------------------------ what enters\n",
    ),
    Mutant(
        "what-waits-to-be-merged-is-given-twice",
        "S6: ids of the old list are merged into the new one",
        LISTS,
        "            allocator.release_pages = allocator.release_pages[:0]\n",
        "            allocator.release_pages = allocator.release_pages\n",
    ),
    Mutant(
        "the-next-prompt-fills-what-goes",
        "quantities: what is about to go is given first",
        COMPACTION,
        "        np.concatenate((rest[stays], rest[~stays])),\n",
        "        np.concatenate((rest[~stays], rest[stays])),\n",
    ),
    Mutant(
        "the-whole-of-a-half-run-goes",
        "quantities: runs of which a part went are one",
        BOOK,
        "        self._begins[first_page + count : first_page + count + 1] |= self._published[\n"
        "            first_page + count : first_page + count + 1\n"
        "        ]\n",
        "",
    ),
    # ------------------------------------------------------------------ when
    Mutant(
        "asks-in-every-idle-step",
        "quantities: marks without end at idle",
        COMPACTION,
        "        self._next_look = now + LOOK_AGAIN_S if used is None else math.inf\n",
        "        self._next_look = now\n",
    ),
    Mutant(
        "never-looks-again",
        "L: a session that is closed at idle keeps all memory",
        COMPACTION,
        "        self._next_look = now + LOOK_AGAIN_S if used is None else math.inf\n",
        "        self._next_look = math.inf\n",
    ),
    Mutant(
        "a-full-card-ends-an-idle-engine",
        "L: looking whether anything could move ends rank 0",
        COMPACTION,
        "        except torch.cuda.OutOfMemoryError:\n            used = None",
        "        except ZeroDivisionError:\n            used = None",
    ),
    Mutant(
        "an-open-session-costs-a-walk",
        "quantities: a large tree is walked every second",
        COMPACTION,
        "        if int(cache.evictable_size()) // size + known.available() != known.book.count:\n            return None\n",
        "",
    ),
    Mutant(
        "another-version-is-found-out-late",
        "L: an engine that lacks a name ends when it is idle for the first time",
        COMPACTION,
        "                self._look_at_all()\n",
        "                self._holders()\n",
    ),
    Mutant(
        "moves-what-is-about-to-be-evicted",
        "quantities: rows are copied that the same idle time drops",
        RUNTIME,
        "        if self._compacting().due(idle=idle and not surplus):\n",
        "        if self._compacting().due(idle=idle):\n",
    ),
    Mutant(
        "moves-although-it-is-switched-off",
        "settings: KVCACHED_DIST_COMPACTION has no effect",
        RUNTIME,
        "            stages, wanted = self.started.stage.pp_size, self.config.compaction\n",
        "            stages, wanted = self.started.stage.pp_size, True\n",
    ),
)

__all__ = ["MUTANTS", "UNBROKEN"]
