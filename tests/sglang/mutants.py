"""One-line breaks of what the plugin does with cached prefixes. Each must be found by a test of :data:`mutation.TESTS`."""

# ruff: noqa: E501  (the texts of the mutants are lines of other files)

from __future__ import annotations

from tests.simulation.mutant import Mutant

COMPACTION = "kvcached_dist/sglang/compaction.py"
PLACEMENT = "kvcached_dist/sglang/placement.py"
MOVABLE = "kvcached_dist/sglang/movable.py"
BACKING = "kvcached_dist/pools/backing.py"
LISTS = "kvcached_dist/sglang/lists.py"
BOOK = "kvcached_dist/sglang/book.py"
RUNTIME = "kvcached_dist/sglang/runtime.py"
PLUGIN = "kvcached_dist/sglang/plugin.py"
ENGINE = "kvcached_dist/sglang/engine.py"

UNBROKEN = Mutant("unbroken", "nothing", PLACEMENT, "LEAST_SHARE = 16\n", "LEAST_SHARE = 16  # as it is\n")

MUTANTS = (
    # ------------------------------------------------------------------ the same bytes behind the same tokens
    Mutant(
        "rows-stay-where-they-were",
        "S3: a node names rows that were not copied",
        COMPACTION,
        "            self._copy(self._lanes[name], known.beside(move.sources), known.beside(move.targets))\n",
        "            del known\n",
    ),
    Mutant(
        "only-the-first-buffer-is-copied",
        "S3: keys move and values do not",
        COMPACTION,
        "        for lane in lanes:\n            try:\n",
        "        for lane in lanes[:1]:\n            try:\n",
    ),
    Mutant(
        "only-the-first-part-is-copied",
        "S3: what does not fit into one part is lost",
        COMPACTION,
        "        lane.index_copy_(0, entered, lane.index_select(0, left))\n",
        "        lane.index_copy_(0, entered, lane.index_select(0, left))\n        break\n",
    ),
    Mutant(
        "a-page-is-its-first-token",
        "S3: of a page of several tokens one moves",
        COMPACTION,
        "        tokens = (places[held.blocks][:, None] * size + np.arange(size)).reshape(-1)\n",
        "        tokens = (places[held.blocks][:, None] * size + 0 * np.arange(size)).reshape(-1)\n",
    ),
    Mutant(
        "nodes-are-told-before-the-copies",
        "S7: a copy that fails leaves nodes that name other rows",
        COMPACTION,
        "            self._copy(self._lanes[name], known.beside(move.sources), known.beside(move.targets))\n"
        "        for name, move in moves.items():\n"
        "            for node, value in zip(held[name].nodes, changes.values[name], strict=True):\n"
        "                node.value = value\n",
        "            for node, value in zip(held[name].nodes, changes.values[name], strict=True):\n"
        "                node.value = value\n"
        "            self._copy(self._lanes[name], known.beside(move.sources), known.beside(move.targets))\n"
        "        for name, move in moves.items():\n",
    ),
    Mutant(
        "a-full-card-ends-the-group",
        "L: memory that torch's allocator keeps unused ends all ranks",
        COMPACTION,
        "            torch.cuda.empty_cache()\n            changes = self._changes()\n",
        "            raise\n",
    ),
    # ------------------------------------------------------------------ only what nobody else uses
    Mutant(
        "moves-under-a-request",
        "S4: rows move while the engine works",
        COMPACTION,
        "        if not scheduler.is_fully_idle() or any(part.free_group is not None for part in parts_of(self._allocator)):\n",
        "        if any(part.free_group is not None for part in parts_of(self._allocator)):\n",
    ),
    Mutant(
        "moves-what-is-locked",
        "S4: rows move that somebody has locked",
        COMPACTION,
        "        if cache.protected_size():\n            return None\n",
        "",
    ),
    Mutant(
        "ids-of-others-are-forgotten",
        "S6: ids that neither the list nor the cache holds are given to somebody",
        COMPACTION,
        "        return blocks if whole and known.book.are_all(np.concatenate((blocks, known.free_ids()))) else None\n",
        "        return blocks if whole else None\n",
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
        MOVABLE,
        '        "speculative decoding with pools of its own": engine.context("spec").speculative_algorithm is not None\n        and not drafts_too,\n',
        "",
    ),
    Mutant(
        "moves-in-pipelines",
        "S4: a late stage still reads what moves",
        MOVABLE,
        '    if stages > 1:\n        return "pipeline stages"\n',
        "",
    ),
    Mutant(
        "copies-before-the-last-batch-has-written",
        "S3: an engine whose stream of batches has another name is not waited for",
        COMPACTION,
        "            scheduler.forward_stream if on_a_card else None, self._nodes(),\n",
        "            self._nodes(),\n",
    ),
    # ------------------------------------------------------------------ equal on all ranks
    Mutant(
        "in-the-order-of-the-tree",
        "S5: where an id goes depends on the order in which a process walks its tree",
        PLACEMENT,
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
        PLACEMENT,
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
        "        self._next_look = now + LOOK_AGAIN_S if held is None else math.inf\n",
        "        self._next_look = now\n",
    ),
    Mutant(
        "never-looks-again",
        "L: a session that is closed at idle keeps all memory",
        COMPACTION,
        "        self._next_look = now + LOOK_AGAIN_S if held is None else math.inf\n",
        "        self._next_look = math.inf\n",
    ),
    Mutant(
        "a-full-card-ends-an-idle-engine",
        "L: looking whether anything could move ends rank 0",
        COMPACTION,
        "        except torch.cuda.OutOfMemoryError:\n            held = None",
        "        except ZeroDivisionError:\n            held = None",
    ),
    Mutant(
        "an-open-session-costs-a-walk",
        "quantities: a large tree is walked every second",
        COMPACTION,
        "        if int(cache.evictable_size()) // self._page_size + known.available() != known.book.count:\n            return None\n",
        "",
    ),
    Mutant(
        "another-version-is-found-out-late",
        "L: an engine that lacks a name ends when it is idle for the first time",
        COMPACTION,
        "                self._look_at_all()\n",
        "                self._nodes()\n",
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
        "drafts_too=drafts_too, wanted=self.config.compaction\n",
        "drafts_too=drafts_too\n",
    ),
    Mutant(
        "one-draft-speaks-for-all",
        "S3: the rows of a draft that the engine built otherwise stay behind",
        RUNTIME,
        "bool(self._drafts) and all(self._drafts)\n",
        "any(self._drafts)\n",
    ),
    # ------------------------------------------------------------------ windows
    Mutant(
        "windows-stay-where-they-were",
        "S3: the nodes of a window name blocks that were not copied",
        COMPACTION,
        "        for name, move in moves.items():\n            known = held[name].known\n",
        "        for name, move in list(moves.items())[:1]:\n            known = held[name].known\n",
    ),
    Mutant(
        "the-table-names-old-places",
        "S3: a full id finds the window of somebody else",
        COMPACTION,
        "            self._map_window(*changes.window)\n",
        "            pass\n",
    ),
    Mutant(
        "the-table-keeps-what-is-gone",
        "S3: an id that is given again seems to have a window, and freeing it frees that of another",
        COMPACTION,
        "        table[:-1].zero_()\n",
        "",
    ),
    Mutant(
        "the-table-loses-its-end",
        "engine: the place of no token is the null block",
        COMPACTION,
        "        table[:-1].zero_()\n",
        "        table.zero_()\n",
    ),
    Mutant(
        "the-table-is-another-one",
        "S3: pools and captured graphs read the old one",
        COMPACTION,
        "        table.index_copy_(0, full, window)\n",
        "        self._allocator.full_to_swa_index_mapping = table.index_copy(0, full, window)\n",
    ),
    Mutant(
        "full-ids-before-the-move",
        "S3: the table has the window of an id where the id was before",
        COMPACTION,
        "_together([values[specs.FULL][number] for number in held[specs.SWA].full_node], table.device)\n",
        "_together([held[specs.FULL].nodes[number].value for number in held[specs.SWA].full_node], table.device)\n",
    ),
    Mutant(
        "windows-of-the-first-nodes",
        "S3: a window belongs to the full ids of another node",
        COMPACTION,
        "of[specs.SWA] = [nodes[number][1] for number in windows], windows\n",
        "of[specs.SWA] = [nodes[number][1] for number in windows], range(len(windows))\n",
    ),
    Mutant(
        "the-table-is-not-looked-at",
        "S6: an entry of somebody else is lost",
        COMPACTION,
        "            if not self._is_mapped([nodes[number] for number in windows]):\n                return None\n",
        "",
    ),
    Mutant(
        "entries-of-nobody-do-not-count",
        "S6: an entry of somebody else is lost",
        COMPACTION,
        "        return int(table.count_nonzero()) == len(window) and bool(",
        "        return bool(",
    ),
    Mutant(
        "moves-into-a-ring",
        "S3: window blocks belong to a request's row, not to ids",
        MOVABLE,
        '        "a window that is a ring of each request": bool(getattr(allocator, "swa_req_ring", False)),\n',
        "",
    ),
    Mutant(
        "keys-move-and-scales-do-not",
        "S3: a part of the indexer is a pool of the engine itself",
        MOVABLE,
        "            part.uses_aiter_fp4_layout for part in",
        "            False and part.uses_aiter_fp4_layout for part in",
    ),
    Mutant(
        "one-buffer-of-each-pool",
        "S3: what a domain indexes is not all of it",
        BACKING,
        "for lane in self.tensor(pool.name, bank)]\n",
        "for lane in self.tensor(pool.name, bank)[:1]]\n",
    ),
    # ------------------------------------------------------------------ the fewest
    Mutant(
        "any-runs-that-hold-it",
        "quantities: more stays published than has to",
        PLACEMENT,
        "    if sizes[chosen].sum() >= sizes[least].sum() + worth:\n        chosen = least\n",
        "",
    ),
    Mutant(
        "a-sum-that-is-too-long",
        "quantities: more stays published than has to",
        PLACEMENT,
        "    below = (1 << wanted + max(of_length)) - 1\n",
        "    below = (1 << wanted + 1 + max(of_length) // 2) - 1\n",
    ),
)

__all__ = ["MUTANTS", "UNBROKEN"]
