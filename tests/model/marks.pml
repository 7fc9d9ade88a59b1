/*
 * Where an entry takes effect: marks, gates, foreground grants, GROWABLE, epochs and the mark stream.
 *
 * Two pages, allocated and freed one at a time by a deterministic rule (lowest id first). Every rank
 * performs the same operations; nothing tells it the ids. A follower gets two ordered streams: the
 * engine's operations, and the leader's marks, one per step, and one more at an operation where the
 * ranks run short. It may be behind by as many steps as the operation stream holds. The physical work
 * is one step for all ranks here (grow.pml and reclaim.pml show it in full).
 */
#include "common.pml"

#ifndef LAG
#define LAG 2
#endif
#ifndef EPOCHS
#define EPOCHS 1                /* changes of epoch */
#endif
#define SLOTS 8                 /* log indices and retirements are compared modulo this */
#define IN_MARK 9               /* the id of this operation comes with its verdict */
#define PAGES 3                 /* two pages, as a set */
#define LOW(set) (((set) & 1) -> 1 : ((set) & 2))
#define COUNT(set) (((set) & 1) + (((set) >> 1) & 1))

mtype = { PUBLISH, RETIRE, UNRETIRE, ALLOC, FREE,
          IDLE, GROWING, READY, DRAINING, RELEASING };
#define NONE 0
#define AT_MARK 0               /* the rank's next act: take the mark of this step */
#define AT_OP 1                 /* do the operation of this step */
#define AT_GRANT 2              /* short of a page: wait for the verdict of this operation */

/* at an operation, hit, first index, entries, entry, page, GROWABLE, epoch; and, to compare, the id */
chan marks[N] = [2 * LAG + 2] of { bit, bit, byte, byte, mtype, byte, byte, byte, byte };
chan ops[N]   = [LAG] of { mtype, byte };       /* operation; to compare: the id that rank 0 got */

/* The leader. */
mtype phase = IDLE;
byte page;                      /* page of the open transaction */
byte held;                      /* pages whose handles are held: published, leaving or retained */
byte retained;
byte mapped;                    /* pages mapped on every rank */
byte next_index, epoch;
byte growable_said = 2;
bit  refused;                   /* the last grow was refused: no second one for the same shortage */

/* Each rank. */
byte published[N], used[N], retired[N], growable[N] = 2;
byte applied[N], at[N], seen[N];
byte retired_by[N];             /* retirements applied, modulo SLOTS: stands for DRAINED(txn) */

#define AVAILABLE(r) (published[r] & ~used[r])
#if FOLLOWERS == 3
#define ROOM (len(ops[1]) < 1 && nfull(ops[2]) && nfull(ops[3]))
#define RETIRED_EVERYWHERE (retired_by[0] == retired_by[1] && retired_by[0] == retired_by[2] && \
                            retired_by[0] == retired_by[3])
#define DELIVERED (len(marks[1]) + len(marks[2]) + len(marks[3]) == 0)
#define ANYWHERE(list) (list[0] | list[1] | list[2] | list[3])
#else
#define ROOM (len(ops[1]) < 1 && nfull(ops[2]))
#define RETIRED_EVERYWHERE (retired_by[0] == retired_by[1] && retired_by[0] == retired_by[2])
#define DELIVERED (len(marks[1]) + len(marks[2]) == 0)
#define ANYWHERE(list) (list[0] | list[1] | list[2])
#endif
#define FOREACH(i, n) i = 0; do :: i < (n) ->
#define END(i) i++ :: else -> break od; i = 0

/* One entry takes effect on rank r. */
inline apply(r, entry, p) {
    if
    :: entry == PUBLISH ->
        REQUIRE(S6, (published[r] & p) == 0);
        published[r] = published[r] | p
    :: entry == RETIRE ->       /* exactly this page, free here, or one that was never published */
        REQUIRE(S6, (used[r] & p) == 0);
        published[r] = published[r] & ~p; retired[r] = retired[r] | p;
        retired_by[r] = (retired_by[r] + 1) % SLOTS
    :: entry == UNRETIRE ->
        REQUIRE(S6, (retired[r] & p) != 0);
        published[r] = published[r] | p; retired[r] = retired[r] & ~p
    :: else
    fi
}

/* The operation of rank r: lowest free page, lowest used page; id is 0 for a miss. */
inline operate(r, op, id) {
    id = 0;
    if
    :: op == ALLOC && AVAILABLE(r) -> id = LOW(AVAILABLE(r)); used[r] = used[r] | id
    :: op == FREE && used[r] -> id = LOW(used[r]); used[r] = used[r] & ~id
    :: else
    fi;
    REQUIRE(S3, (used[r] & ~mapped) == 0)
}

/* The leader appends, applies and broadcasts in one go (M5, M7). */
inline mark(at_op, hit, entry, p) {
    if                          /* nothing on its way: numbers may start again (fewer states) */
    :: DELIVERED -> FOREACH(x, N) applied[x] = 0; END(x); next_index = 0
    :: else
    fi;
    if
    :: RETIRED_EVERYWHERE && phase == IDLE -> FOREACH(x, N) retired_by[x] = 0; END(x)
    :: else
    fi;
#ifdef MUTANT_M6_FALLS_LATE
    g = 2 - COUNT(held);
#endif
    if
    :: entry == PUBLISH -> held = held | p
    :: else
    fi;
#ifdef MUTANT_M6_RISES_EARLY
    g = 2 - COUNT(published[0] | retained | (entry == PUBLISH || entry == UNRETIRE -> p : 0));
    if :: entry == RETIRE -> g = g + COUNT(p & published[0]) :: else fi;
#elif !defined(MUTANT_M6_FALLS_LATE)
    g = 2 - COUNT(held);
#endif
    entries = (entry -> 1 : 0) + at_op + (g != growable_said -> 1 : 0);
    growable_said = g;
#ifdef MUTANT_M7_APPEND_EARLY
    if :: entry != PUBLISH -> apply(0, entry, p) :: else fi;
#else
    apply(0, entry, p);
#endif
    growable[0] = g;
    if :: at_op && hit -> operate(0, ALLOC, id) :: else fi;
    REQUIRE(CAPACITY, COUNT(held) + g <= 2);
    REQUIRE(CAPACITY, COUNT(published[0]) + g <= 2);
    FOREACH(x, N)
        if :: x > 0 -> marks[x]!at_op, hit, next_index, entries, entry, p, g, epoch, id :: else fi;
    END(x);
    next_index = (next_index + entries) % SLOTS;
    entries = 0; g = 0; id = 0
}

inline end_of_mark() {
    if
    :: entry == RETIRE -> phase = DRAINING; page = p
    :: entry == UNRETIRE || entry == PUBLISH -> phase = IDLE; page = 0
    :: else
    fi;
    entry = NONE; p = 0
}

proctype Leader() {
    byte x, p, g, entries, id;
    mtype entry, op;
    do
    /* The mark of a step, empty or with one decision taken here and now. */
    :: atomic { at[0] == AT_MARK && ROOM ->
        if
        :: phase == READY -> entry = PUBLISH; p = page
        :: phase == IDLE && AVAILABLE(0) -> entry = RETIRE; p = LOW(AVAILABLE(0))
        :: phase == IDLE && retained -> entry = RETIRE; p = LOW(retained)
        :: phase == DRAINING && !(page & retained) -> entry = UNRETIRE; p = page
        :: phase != READY
        fi;
        d_step {
            mark(0, 0, entry, p);
            refused = 0;
            end_of_mark();
            at[0] = AT_OP } }
    /* The operation of the step goes into the engine's stream, whatever becomes of it here. */
    :: atomic { at[0] == AT_OP ->
        if :: op = ALLOC :: used[0] -> op = FREE :: op = NONE fi;
        d_step {
            if
            :: op == ALLOC && AVAILABLE(0) == 0 -> id = IN_MARK; at[0] = AT_GRANT
            :: else -> operate(0, op, id); at[0] = AT_MARK
            fi;
            FOREACH(x, N) if :: x > 0 -> ops[x]!op, id :: else fi; END(x);
            op = 0; id = 0 } }
    /* A shortage: the retirement that drains is cancelled, a grow waited for, or the answer is a miss. */
    :: d_step { at[0] == AT_GRANT && (phase == READY || phase == DRAINING && !(page & retained)) ->
        entry = (phase == READY -> PUBLISH : UNRETIRE); p = page;
        mark(1, 1, entry, p);
        end_of_mark();
        refused = 0; at[0] = AT_MARK }
    :: d_step { at[0] == AT_GRANT && (phase == RELEASING || phase == DRAINING && (page & retained) ||
                                      phase == IDLE && (refused || held == PAGES)) ->
        mark(1, 0, NONE, 0);
        refused = 0; at[0] = AT_MARK }
    od
}

/* The agents of all ranks: grow ahead of demand or for a shortage, drain, unmap, release. */
proctype Agents() {
    byte x, p;
end: do
    :: d_step { phase == IDLE && held != PAGES && !refused ->
        page = LOW(PAGES & ~held); phase = GROWING }
    :: atomic { phase == GROWING ->
        if
        :: mapped = mapped | page; phase = READY
#ifdef MUTANT_M7_APPEND_EARLY
            ; d_step { apply(0, PUBLISH, page) }
#endif
#ifndef NO_FAULTS
        :: refused = 1; page = 0; phase = IDLE          /* refused */
        :: retained = retained | page; held = held | page; refused = 1; page = 0; phase = IDLE
#endif
        fi }
    :: d_step { phase == DRAINING && RETIRED_EVERYWHERE -> phase = RELEASING }
    :: d_step { phase == RELEASING ->
        REQUIRE(S4, ((ANYWHERE(published) | ANYWHERE(used)) & page) == 0);
        mapped = mapped & ~page; held = held & ~page; retained = retained & ~page;
        FOREACH(x, N) retired[x] = retired[x] & ~page; END(x);
        page = 0; phase = IDLE }
    od
}

/* A change of epoch: links only. A follower learns of it before or after what is in its streams. */
proctype Links() {
end: do
    :: d_step { epoch < EPOCHS -> epoch++ }
    od
}

#ifdef MUTANT_M1_FENCE_STREAM
#define FENCED(e) ((e) < seen[r])
#else
#define FENCED(e) false
#endif

inline take_mark(r) {
    marks[r]?at_op, hit, index, entries, entry, p, g, e, want;
    if
    :: !FENCED(e) ->
        REQUIRE(S12, index == applied[r]);
        applied[r] = (applied[r] + entries) % SLOTS;
        apply(r, entry, p);
        growable[r] = g;
        REQUIRE(CAPACITY, COUNT(published[r]) + growable[r] <= 2)
    :: else
    fi
}

#define FORGET at_op = 0; hit = 0; index = 0; entries = 0; entry = 0; p = 0; g = 0; e = 0; want = 0; id = 0

proctype Follower(byte r) {
    byte index, entries, p, g, e, want, id;
    bit at_op, hit;
    mtype entry, op;
end: do
    :: d_step { at[r] == AT_MARK && nempty(marks[r]) ->
        take_mark(r);
        REQUIRE(S5, !at_op);
        at[r] = AT_OP;
        FORGET }
#ifdef MUTANT_H                 /* no gate: a step does not wait for its mark */
    :: d_step { at[r] == AT_MARK && empty(marks[r]) -> at[r] = AT_OP }
#endif
    :: d_step { at[r] == AT_OP && nempty(ops[r]) ->
        ops[r]?op, want;
        if
        :: op == ALLOC && AVAILABLE(r) == 0 -> REQUIRE(S5, want == IN_MARK); at[r] = AT_GRANT
        :: else -> operate(r, op, id); REQUIRE(S5, id == want); at[r] = AT_MARK
        fi;
        op = 0; want = 0; id = 0 }
    :: d_step { at[r] == AT_GRANT && nempty(marks[r]) ->
        take_mark(r);
        REQUIRE(S5, at_op);     /* the verdict of this operation, not the mark of a later step */
        if
        :: hit -> operate(r, ALLOC, id); REQUIRE(S5, id && id == want)
        :: else
        fi;
        at[r] = AT_MARK;
        FORGET }
    :: d_step { seen[r] < epoch -> seen[r]++ }
    od
}

init {
    byte i;
    atomic {
        run Leader(); run Agents();
#if EPOCHS
        run Links();
#endif
        i = 1;
        do
        :: i < N -> run Follower(i); i++
        :: else -> break
        od;
        i = 0
    }
}

ltl granted { [] (at[0] == AT_GRANT -> <> (at[0] != AT_GRANT)) }
ltl follows { [] (at[N - 1] == AT_GRANT -> <> (at[N - 1] != AT_GRANT)) }
