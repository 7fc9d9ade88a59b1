/*
 * Epochs: a link is lost, or a follower dies, is restarted and joins with an empty mapping, at any
 * moment of a grow or a reclaim of one run. Rules M1 and M2, fencing of the old epoch, snapshot, JOINED.
 *
 * Each link has its own channels per epoch. What is left on a closed link can still be found in the
 * worker's queue before or after the snapshot arrives; the engine's stream goes on across epochs. Rank 0
 * does its own work at once and without faults (grow.pml and reclaim.pml have those).
 */
#include "common.pml"

#ifndef EPOCHS
#define EPOCHS 1                /* changes of epoch */
#endif
#ifndef LAG
#define LAG 2                   /* entries by which the last follower may be behind */
#endif
#define INDICES 8               /* log indices are compared modulo this */

mtype = { RESERVE, MAP, ABORT, UNMAP, RESTORE, RELEASE, SNAPSHOT,
          RESERVED, REFUSED, MAPPED, MAP_FAILED, DRAINED, UNMAPPED, UNMAP_FAILED, RESTORED, RELEASED, JOINED,
          PUBLISH, RETIRE, UNRETIRE,
          IDLE, VOTING, MAPPING, READY, DRAINING, CANCELLING, UNMAPPING, RESTORING, RELEASING, JOINING,
          GONE, HELD, RETAINED, LEAVING,
          UP, DEAD, RESTARTED };

#define LINK(r, e) ((r) * 2 + (e) % 2)
chan down[2 * N]  = [4] of { mtype, byte, byte, mtype };    /* kind, epoch, txn, state of the run */
chan up[2 * N]    = [6] of { mtype, byte, byte, byte };     /* kind, epoch, txn, handles */
chan stream[N]    = [LAG] of { mtype, byte, byte };         /* entry, txn, log index */
byte flying[NUMBERS];

/* The leader. */
mtype phase = IDLE, resume = IDLE;  /* resume: what goes on when every rank has joined */
mtype place = GONE;             /* of the run: GONE, HELD (published, or on its way out), RETAINED */
byte epoch, txn, yes, next_index;
bit  restoring;                 /* READY follows a RESTORE, not a grow */
byte retained_on;               /* ranks that hold the handle of the retained run (from JOINED) */

/* Each rank. The snapshot of an emptied rank names the log index to go on from, and who retired the run. */
mtype status[N] = UP;
bit  handle[N], mapped[N], made[N], published[N], drained[N];
byte retired[N];                /* 1 + transaction number */
byte known[N];                  /* epoch */
byte held_txn[N];               /* 1 + transaction that this rank has reserved for */
byte applied[N], passed_over[N];
bit  emptied[N];
byte snapshot_index[N], snapshot_retired[N];
bit  snapshot_published[N];

/* Ghosts per transaction number. */
byte committed[NUMBERS], aborted[NUMBERS], did_map[NUMBERS];

#if FOLLOWERS == 3
#define ROOM (len(stream[1]) < 1 && nfull(stream[2]) && nfull(stream[3]))
#define DELIVERED (len(stream[1]) + len(stream[2]) + len(stream[3]) == 0)
#define ALL_UP (status[1] == UP && status[2] == UP && status[3] == UP)
#define NO_LINK_WORK (len(down[2]) + len(down[3]) + len(down[4]) + len(down[5]) + len(down[6]) + len(down[7]) + \
                      len(up[2]) + len(up[3]) + len(up[4]) + len(up[5]) + len(up[6]) + len(up[7]) == 0)
#else
#define ROOM (len(stream[1]) < 1 && nfull(stream[2]))
#define DELIVERED (len(stream[1]) + len(stream[2]) == 0)
#define ALL_UP (status[1] == UP && status[2] == UP)
#define NO_LINK_WORK (len(down[2]) + len(down[3]) + len(down[4]) + len(down[5]) + \
                      len(up[2]) + len(up[3]) + len(up[4]) + len(up[5]) == 0)
#endif
#define FOREACH(i, n) i = 0; do :: i < (n) ->
#define END(i) i++ :: else -> break od; i = 0
#if defined(MUTANT_F) || defined(MUTANT_F_CONSEQUENCE)
#define FENCED(theirs, ours) false
#else
#define FENCED(theirs, ours) ((theirs) < (ours))
#endif

#ifdef MUTANT_F_CONSEQUENCE     /* the same fault with S8 itself not looked at */
#define REQUIRE_S8(condition) true
#else
#define REQUIRE_S8(condition) REQUIRE(S8, condition)
#endif

inline check_at_rest() {
    if
    :: NO_LINK_WORK && ALL_UP ->
        FOREACH(x, N)
            REQUIRE(S10, handle[x] == (place == RETAINED -> HAS(retained_on, x) : place == HELD));
        END(x)
    :: else
    fi
}

/* Rank 0 does its part at once. */
inline do_locally(kind) {
    if
    :: kind == RESERVE -> made[0] = !handle[0]; handle[0] = 1
    :: kind == ABORT -> handle[0] = handle[0] && !made[0]; made[0] = 0
    :: kind == MAP -> mapped[0] = 1; did_map[txn] = did_map[txn] | 1
    :: kind == UNMAP -> mapped[0] = 0
    :: kind == RESTORE -> mapped[0] = 1
    :: kind == RELEASE -> handle[0] = 0; retired[0] = 0
    :: else
    fi
}

inline broadcast(kind, state) {
    yes = 1;
    do_locally(kind);
    FOREACH(x, N)
        if
        :: x > 0 && status[x] == UP ->
            down[LINK(x, epoch)]!kind, epoch, txn, state; flying[txn]++
        :: else
        fi;
    END(x)
}

inline close_transaction() { phase = IDLE; yes = 0; restoring = 0; made[0] = 0; txn = (txn + 1) % NUMBERS }

/* An entry takes effect on rank r. */
inline apply(r, entry, t) {
    if
    :: entry == PUBLISH ->
        REQUIRE(S6, !published[r]);
        REQUIRE(S3, mapped[r]);
        published[r] = 1; retired[r] = 0; drained[r] = 0; held_txn[r] = 0; made[r] = 0;
        committed[t] = committed[t] | BIT(r);
        REQUIRE(S1, aborted[t] == 0)
    :: entry == RETIRE ->
        REQUIRE(S6, published[r] && !retired[r]);
        published[r] = 0; retired[r] = t + 1; drained[r] = 0
    :: entry == UNRETIRE ->
        REQUIRE(S6, retired[r] == t + 1);
        REQUIRE(S3, mapped[r]);
        published[r] = 1; retired[r] = 0; drained[r] = 0
    :: else
    fi
}

inline log_entry(entry) {
    if                          /* nothing on its way: numbers may start again (fewer states) */
    :: DELIVERED && ALL_UP && phase != JOINING -> next_index = 0; FOREACH(x, N) applied[x] = 0; END(x)
    :: else
    fi;
    FOREACH(x, N)
        if
        :: x > 0 && status[x] != DEAD -> stream[x]!entry, txn, next_index; flying[txn]++
        :: else
        fi;
    END(x);
    apply(0, entry, txn);
    next_index = (next_index + 1) % INDICES
}

/* M2: what becomes of the open transaction; what the snapshot says of the run. */
inline resolve() {
    if
    :: phase == VOTING -> do_locally(ABORT); aborted[txn] = aborted[txn] | 1; state = place; resume = IDLE
#ifdef MUTANT_M2_MAP_ABORTED
    :: phase == MAPPING -> state = place; resume = IDLE
#else
    :: phase == MAPPING -> place = RETAINED; retained_on = ALL; state = RETAINED; resume = IDLE
#endif
#ifdef MUTANT_M2_READY_PUBLISHED
    :: phase == READY && !restoring -> state = RETAINED; resume = READY
#else
    :: phase == READY && !restoring -> place = RETAINED; retained_on = ALL; state = RETAINED; resume = IDLE
#endif
    :: phase == READY && restoring -> state = HELD; resume = READY
    :: phase == DRAINING || phase == CANCELLING -> state = HELD; resume = CANCELLING
#ifdef MUTANT_M2_UNMAP_CANCELLED
    :: phase == UNMAPPING -> state = HELD; resume = CANCELLING
#else
    :: phase == UNMAPPING -> state = LEAVING; resume = UNMAPPING
#endif
    :: phase == RELEASING -> state = LEAVING; resume = RELEASING
    :: phase == RESTORING -> state = HELD; resume = READY; restoring = 1; do_locally(RESTORE)
    :: phase == JOINING ->
        state = (resume == UNMAPPING || resume == RELEASING -> LEAVING : place)
    :: phase == IDLE -> state = place; resume = IDLE
    fi
}

inline change_epoch() {
    epoch++;
    resolve();
    phase = JOINING;
    yes = 1;
    FOREACH(x, N)
        if
        :: x > 0 ->
#ifdef GAP_EMPTIED_UNTIL_SNAPSHOT
            emptied[x] = (status[x] == RESTARTED);
#else
            emptied[x] = emptied[x] || status[x] == RESTARTED;  /* until its own JOINED */
#endif
#ifdef GAP_MARKS_ON_LINK
            do
            :: len(stream[x]) > 0 -> stream[x]?_, t, _; flying[t]--
            :: len(stream[x]) == 0 -> break
            od;
#endif
            if :: emptied[x] -> passed_over[x] = len(stream[x]); known[x] = epoch :: else fi;
            status[x] = UP;
            do                  /* of a link two epochs old nothing is left */
            :: len(down[LINK(x, epoch)]) > 0 -> down[LINK(x, epoch)]?_, _, t, _; flying[t]--
            :: len(down[LINK(x, epoch)]) == 0 -> break
            od;
            do
            :: len(up[LINK(x, epoch)]) > 0 -> up[LINK(x, epoch)]?_, _, t, _; flying[t]--
            :: len(up[LINK(x, epoch)]) == 0 -> break
            od;
            snapshot_index[x] = next_index; snapshot_published[x] = published[0];
            snapshot_retired[x] = retired[0];
            down[LINK(x, epoch)]!SNAPSHOT, epoch, txn, state; flying[txn]++
        :: else
        fi;
    END(x);
    state = 0; t = 0
}

/* Every rank has joined the epoch: go on. */
inline go_on() {
    phase = resume; resume = IDLE;
    if
    :: phase == IDLE -> close_transaction()
    :: phase == UNMAPPING -> broadcast(UNMAP, 0)
    :: phase == RELEASING -> broadcast(RELEASE, 0)
    :: else
    fi
}

proctype Leader() {
    byte x, t;
    mtype state;
    do
    :: d_step { phase == IDLE && place != HELD && flying[txn] == 0 ->
        check_at_rest();
        committed[txn] = 0; aborted[txn] = 0; did_map[txn] = 0;
        phase = VOTING; broadcast(RESERVE, 0) }
    :: d_step { phase == VOTING ->                  /* the growth deadline */
        aborted[txn] = aborted[txn] | 1;
        broadcast(ABORT, 0); close_transaction() }
    :: d_step { phase == READY && ROOM ->
        if
        :: restoring
        :: else -> REQUIRE(S2, did_map[txn] == ALL)
        fi;
        FOREACH(x, N) REQUIRE(S3, status[x] != UP || mapped[x]); END(x);
        place = HELD; retained_on = 0;
        log_entry(PUBLISH); close_transaction() }
    :: d_step { phase == IDLE && place == HELD && ROOM && flying[txn] == 0 ->
        check_at_rest();
        committed[txn] = 0; aborted[txn] = 0; did_map[txn] = 0;
        log_entry(RETIRE);
        phase = DRAINING; yes = 1 }
    :: d_step { (phase == DRAINING || phase == CANCELLING) && ROOM -> log_entry(UNRETIRE); close_transaction() }
    :: d_step { phase == JOINING && resume == CANCELLING && ROOM -> log_entry(UNRETIRE); resume = IDLE }
    /* A link is lost while both ends live; or a follower that died has been started again. */
    :: d_step { epoch < EPOCHS && status[1] != DEAD && status[N - 1] != DEAD -> change_epoch() }
    od
}

inline take(r, what, h) {
    if
    :: what == JOINED && phase == JOINING ->
        yes = yes | BIT(r);
#ifndef MUTANT_M2_COUNT
        retained_on = (retained_on & ~BIT(r)) | (place == RETAINED && h -> BIT(r) : 0);
#endif
        if :: yes == ALL -> go_on() :: else fi
    :: what == RESERVED && phase == VOTING ->
        yes = yes | BIT(r);
        if :: yes == ALL -> phase = MAPPING; broadcast(MAP, 0) :: else fi
    :: what == REFUSED && phase == VOTING ->
        aborted[txn] = aborted[txn] | 1; broadcast(ABORT, 0); close_transaction()
    :: what == MAPPED && phase == MAPPING ->
        yes = yes | BIT(r);
        if :: yes == ALL -> phase = READY :: else fi
    :: what == MAP_FAILED && phase == MAPPING -> yes = yes | BIT(r) | 128
    :: what == DRAINED && phase == DRAINING ->
        yes = yes | BIT(r);
        if :: yes == ALL -> phase = UNMAPPING; broadcast(UNMAP, 0) :: else fi
    :: what == UNMAPPED && phase == UNMAPPING ->
        yes = yes | BIT(r);
        if :: yes == ALL -> phase = RELEASING; broadcast(RELEASE, 0) :: else fi
    :: what == UNMAP_FAILED && phase == UNMAPPING -> phase = RESTORING; broadcast(RESTORE, 0)
    :: what == RESTORED && phase == RESTORING ->
        yes = yes | BIT(r);
        if :: yes == ALL -> phase = READY; restoring = 1 :: else fi
    :: what == RELEASED && phase == RELEASING ->
        yes = yes | BIT(r);
        if :: yes == ALL -> place = GONE; close_transaction() :: else fi
    :: else
    fi;
    if                          /* all have answered the MAP, not all with yes */
    :: phase == MAPPING && yes == (ALL | 128) -> place = RETAINED; retained_on = ALL; close_transaction()
    :: else
    fi
}

inline receive() {
    flying[t]--;
    if
    :: !FENCED(e, epoch) && t == txn -> REQUIRE_S8(e == epoch); take(r, what, h)
    :: else
    fi;
    e = 0; t = 0; h = 0; what = 0
}

proctype Reader(byte r) {
    byte x, e, t, h;
    mtype what;
end: do
    :: d_step { nempty(up[LINK(r, 0)]) -> up[LINK(r, 0)]?what, e, t, h; receive() }
    :: d_step { nempty(up[LINK(r, 1)]) -> up[LINK(r, 1)]?what, e, t, h; receive() }
    od
}

inline answer(r, what, e, t) { up[LINK(r, e)]!what, e, t, handle[r]; flying[t]++ }

inline do_snapshot(r, e, t, state) {
#ifdef MUTANT_E                 /* no snapshot: presumed abort of what is not published here */
    if :: !published[r] && !retired[r] -> mapped[r] = 0; handle[r] = 0 :: else fi;
#else
    if
    :: state == HELD -> handle[r] = 1; mapped[r] = 1
    :: state == GONE ->
        handle[r] = handle[r] && !made[r];
        if :: held_txn[r] -> aborted[t] = aborted[t] | BIT(r) :: else fi
    :: else                     /* RETAINED or LEAVING: keep what is there */
    fi;
#endif
    known[r] = e; made[r] = 0; held_txn[r] = 0;
    if
#ifdef MUTANT_M1_LOGICAL
    :: true ->
#else
    :: emptied[r] ->
#endif
        published[r] = snapshot_published[r]; retired[r] = snapshot_retired[r]; applied[r] = snapshot_index[r]
#ifdef GAP_UNRETIRE_NAMES_NO_RUN
        ; retired[r] = 0
#endif
    :: else
    fi;
    emptied[r] = 0;
    snapshot_published[r] = 0; snapshot_retired[r] = 0; snapshot_index[r] = 0;
    answer(r, JOINED, e, t)
}

inline work(r, kind, e, t, state) {
    if
    :: kind == SNAPSHOT -> d_step { do_snapshot(r, e, t, state) }
    :: kind == RESERVE ->
        REQUIRE(S6, !published[r]);
        if
        :: d_step { true -> made[r] = !handle[r]; handle[r] = 1; held_txn[r] = t + 1; answer(r, RESERVED, e, t) }
        :: d_step { true -> made[r] = 0; held_txn[r] = 0; answer(r, REFUSED, e, t) }
        fi
    :: kind == ABORT ->
        d_step {
            if
            :: held_txn[r] == t + 1 ->
                REQUIRE(S1, committed[t] == 0);
                aborted[t] = aborted[t] | BIT(r);
                handle[r] = handle[r] && !made[r]; made[r] = 0; held_txn[r] = 0
            :: else
            fi }
    :: kind == MAP ->
        REQUIRE(S7, held_txn[r] == t + 1);
        if
        :: d_step { true -> mapped[r] = 1; made[r] = 0; did_map[t] = did_map[t] | BIT(r); answer(r, MAPPED, e, t) }
        :: d_step { true -> made[r] = 0; answer(r, MAP_FAILED, e, t) }
        fi
    :: kind == UNMAP ->
        REQUIRE(S4, !published[r]);
        REQUIRE(S4, !mapped[r] || retired[r] == t + 1 && drained[r]);
        if
        :: d_step { true -> mapped[r] = 0; answer(r, UNMAPPED, e, t) }
        :: d_step { mapped[r] -> mapped[r] = 0; answer(r, UNMAP_FAILED, e, t) }
        fi
    :: kind == RESTORE ->
#ifdef GAP_RESTORE_CREATES_NOTHING
        REQUIRE(S10, handle[r]);
#endif
        /* A rank emptied while the run was leaving has no handle of it and must create it again. */
        d_step { handle[r] = 1; mapped[r] = 1; answer(r, RESTORED, e, t) }
    :: kind == RELEASE ->
        REQUIRE(S4, !mapped[r]);
        d_step { handle[r] = 0; retired[r] = 0; drained[r] = 0; answer(r, RELEASED, e, t) }
    fi
}

/* A worker takes what its link thread has queued. Leftovers of an older epoch are dropped (S8). */
inline job(r, link) {
    down[link]?kind, e, t, state;
    flying[t]--;
    if
    :: FENCED(e, known[r]) || kind != SNAPSHOT && emptied[r]
    :: else -> REQUIRE_S8(kind == SNAPSHOT || e == known[r]); work(r, kind, e, t, state)
    fi;
    e = 0; t = 0; kind = 0; state = 0
}

proctype Worker(byte r) {
    byte e, t;
    mtype kind, state;
end: do
    :: atomic { status[r] == UP && nempty(down[LINK(r, 0)]) -> job(r, LINK(r, 0)) }
    :: atomic { status[r] == UP && nempty(down[LINK(r, 1)]) -> job(r, LINK(r, 1)) }
    :: d_step { status[r] == UP && retired[r] && !drained[r] && !emptied[r] ->
        drained[r] = 1; t = retired[r] - 1; answer(r, DRAINED, known[r], t); t = 0 }
    od
}

proctype Scheduler(byte r) {
    byte t, index;
    mtype entry;
end: do
#ifdef MUTANT_M1_BEFORE_JOINED
    :: d_step { status[r] == UP && nempty(stream[r]) ->
#else
    :: d_step { status[r] == UP && !emptied[r] && nempty(stream[r]) ->
#endif
        stream[r]?entry, t, index;
        flying[t]--;
        if
        :: passed_over[r] -> passed_over[r]-- /* before the index that the snapshot names */
        :: else ->
            REQUIRE(S12, index == applied[r]);
            apply(r, entry, t);
            applied[r] = (applied[r] + 1) % INDICES
        fi;
        t = 0; index = 0; entry = 0 }
    od
}

/* A follower dies; what it held goes with it; later it is started again, empty. */
proctype Crash(byte r) {
    byte t;
    d_step { epoch < EPOCHS && status[r] == UP && !emptied[r] ->
        status[r] = DEAD;
        handle[r] = 0; mapped[r] = 0; made[r] = 0; published[r] = 0; drained[r] = 0; retired[r] = 0;
        held_txn[r] = 0; applied[r] = 0; passed_over[r] = 0;
        snapshot_index[r] = 0; snapshot_published[r] = 0; snapshot_retired[r] = 0;
        do :: len(stream[r]) > 0 -> stream[r]?_, t, _; flying[t]-- :: len(stream[r]) == 0 -> break od;
        do
        :: len(down[LINK(r, 0)]) > 0 -> down[LINK(r, 0)]?_, _, t, _; flying[t]--
        :: len(down[LINK(r, 0)]) == 0 -> break
        od;
        do
        :: len(down[LINK(r, 1)]) > 0 -> down[LINK(r, 1)]?_, _, t, _; flying[t]--
        :: len(down[LINK(r, 1)]) == 0 -> break
        od;
        t = 0 }
    status[r] = RESTARTED
}

init {
    byte i;
    atomic {
        i = 1;
        do
        :: i < N -> run Worker(i); run Reader(i); run Scheduler(i); i++
        :: else -> break
        od;
        i = 0;
#ifndef NO_CRASH
        run Crash(N - 1);
#endif
        run Leader()
    }
}

ltl resolved { [] (phase == JOINING -> <> (phase != JOINING)) }
ltl ends { [] ((phase != IDLE) -> <> (phase == IDLE)) }
