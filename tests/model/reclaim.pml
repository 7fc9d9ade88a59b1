/*
 * Reclaim of one run: RETIRE at a mark, DRAIN with stages that lag, UNRETIRE, UNMAP, RESTORE after a
 * failed unmap, RELEASE; then the run is grown again (without faults: grow.pml has those), for ever.
 *
 * Every follower reads the marks and the engine's operations from an ordered channel of its own and may
 * be behind by as many steps as it holds (one for the first stage, LAG for the last). A step applies its
 * entry, then its operation, and launches a batch that touches the run if a request holds it; the device
 * finishes batches some time later.
 */
#include "common.pml"

#ifndef LAG
#define LAG 2
#endif

mtype = { NOTHING, RETIRE, UNRETIRE, PUBLISH, ALLOC, FREE,
          GROW, UNMAP, RESTORE, RELEASE,
          DRAINED, MAPPED, UNMAPPED, UNMAP_FAILED, RESTORED, RESTORE_FAILED, RELEASED, RELEASE_FAILED,
          IDLE, GROWING, DRAINING, UNMAPPING, RESTORING, RELEASING, READY, FAILED };

chan stream[N] = [LAG] of { mtype, byte, mtype };       /* entry, txn, operation */
chan down[N]   = [2 * NUMBERS] of { mtype, byte };      /* kind, txn */
chan up[N]     = [3 * NUMBERS] of { mtype, byte };      /* kind, txn */
byte flying[NUMBERS];

/* The leader. */
mtype phase = IDLE;
byte txn, yes;
bit backed = 1;                 /* the leader's count of the run's handle, per rank */
#ifdef MUTANT_M5_EARLY_PICK
bit picked;
#endif

/* Each rank: the run in its free list, in use, retired by which transaction; its memory; its device. */
bit  published[N] = 1;
bit  used[N];
byte retired[N];                /* 1 + transaction number */
bit  drained[N];
bit  handle[N] = 1;
bit  mapped[N] = 1;
bit  busy[N];                   /* a launched batch that touches the run has not finished */
#ifdef LOSS
mtype table[N] = NOTHING;
bit lost;                       /* the last answer of rank N - 1 was lost */
bit overdue;                    /* the drain deadline has passed: cancel at the next mark */
#endif

#define NONE 0                  /* no entry, no operation */
#define OPEN (phase != IDLE && phase != FAILED)
#define RECLAIMING (phase == DRAINING || phase == UNMAPPING || phase == RESTORING || phase == RELEASING)
#if FOLLOWERS == 3
#define ROOM (len(stream[1]) < 1 && nfull(stream[2]) && nfull(stream[3]))
#define QUIET (len(down[0]) + len(down[1]) + len(down[2]) + len(down[3]) + \
               len(up[0]) + len(up[1]) + len(up[2]) + len(up[3]) == 0)
#define NO_RANK(list) (!list[0] && !list[1] && !list[2] && !list[3])
#else
#define ROOM (len(stream[1]) < 1 && nfull(stream[2]))
#define QUIET (len(down[0]) + len(down[1]) + len(down[2]) + len(up[0]) + len(up[1]) + len(up[2]) == 0)
#define NO_RANK(list) (!list[0] && !list[1] && !list[2])
#endif
#ifdef LOCAL_FAST                /* the leader's own worker is never slow */
#define LOCAL_DONE (len(down[0]) == 0)
#else
#define LOCAL_DONE true
#endif
#define FOREACH(i, n) i = 0; do :: i < (n) ->
#define END(i) i++ :: else -> break od; i = 0
#ifdef MUTANT_M4_STALE_DRAINED
#define CURRENT(t, what) ((t) == txn || what == DRAINED)
#else
#define CURRENT(t, what) ((t) == txn)
#endif

inline send_down(r, kind) { down[r]!kind, txn; flying[txn]++ }
inline broadcast(kind) { yes = 0; FOREACH(x, N) send_down(x, kind); END(x) }
inline close_transaction() {
#ifdef LOSS
    overdue = 0;
#endif
    phase = IDLE; yes = 0; txn = (txn + 1) % NUMBERS
}

inline check_at_rest() {
    if
    :: QUIET -> FOREACH(x, N) REQUIRE(S10, handle[x] == backed); END(x)
    :: else
    fi
}

/* What a rank's scheduler does at one point of the stream. */
inline step(r, entry, t, op) {
    if
    :: entry == RETIRE ->
        REQUIRE(S6, published[r] && !used[r] && !retired[r]);
        published[r] = 0; retired[r] = t + 1; drained[r] = 0
    :: entry == UNRETIRE ->
        REQUIRE(S6, retired[r] == t + 1);
        REQUIRE(S3, mapped[r]);
        retired[r] = 0; drained[r] = 0; published[r] = 1
    :: entry == PUBLISH ->
        REQUIRE(S6, !published[r]);
        REQUIRE(S3, mapped[r]);
        retired[r] = 0; drained[r] = 0; published[r] = 1
    :: else
    fi;
    if
    :: op == ALLOC -> REQUIRE(S5, published[r] && !used[r]); used[r] = 1
    :: op == FREE -> REQUIRE(S5, used[r]); used[r] = 0
    :: else
    fi;
    if
    :: op != NONE -> REQUIRE(S4, mapped[r]); busy[r] = 1  /* the batch of this step touches the run */
    :: else
    fi
}

#if defined(LOSS) && !defined(MUTANT_M4_NEVER_CANCELLED)
#define OVERDUE (phase == DRAINING && overdue)
#else
#define OVERDUE false
#endif

/* The leader's scheduler. Steps without entry and operation would change nothing and are left out. */
proctype LeaderScheduler() {
    byte x, t;
    mtype entry, op;
    do
    :: atomic { LOCAL_DONE && ROOM && phase != FAILED ->
        t = txn;
        if
        :: phase == READY -> entry = PUBLISH
#ifdef MUTANT_M5_EARLY_PICK
        :: phase == IDLE && backed && !picked && published[0] && !used[0] -> picked = 1
        :: phase == IDLE && picked && flying[txn] == 0 -> entry = RETIRE
#else
        :: phase == IDLE && backed && published[0] && !used[0] && flying[txn] == 0 -> entry = RETIRE
#endif
#if !defined(MUTANT_RETIRE_LOCAL) && !defined(MUTANT_M4_NEVER_CANCELLED)
        :: phase == DRAINING -> entry = UNRETIRE        /* a shortage cancels the retirement */
#endif
#ifdef MUTANT_M4_LATE_UNRETIRE
        :: phase == UNMAPPING -> entry = UNRETIRE
#endif
        :: phase != READY && !OVERDUE
        fi;
        if
        :: entry == PUBLISH -> FOREACH(x, N) REQUIRE(S3, mapped[x]); END(x); close_transaction()
        :: entry == RETIRE ->
#ifdef MUTANT_M5_EARLY_PICK
            picked = 0;
#endif
            check_at_rest(); phase = DRAINING
        :: entry == UNRETIRE -> close_transaction()
        :: else
        fi;
#ifdef MUTANT_RETIRE_LOCAL
        entry = (entry == RETIRE -> NONE : entry);
#endif
        if
        :: (published[0] && entry != RETIRE || entry == UNRETIRE || entry == PUBLISH) && !used[0] -> op = ALLOC
        :: used[0] -> op = FREE
        :: true
        fi;
        if
        :: entry == NONE && op == NONE
        :: else ->
            step(0, entry, t, op);
            FOREACH(x, N)
                if
                :: x > 0 -> stream[x]!entry, t, op; flying[t] = flying[t] + (entry -> 1 : 0)
                :: else
                fi;
            END(x)
        fi;
#ifdef MUTANT_G                 /* shrink without drain */
        if :: phase == DRAINING -> phase = UNMAPPING; broadcast(UNMAP) :: else fi;
#endif
        t = 0; entry = 0; op = 0 }
    /* The run is grown again once every rank has released it (M6). */
    :: d_step { LOCAL_DONE && phase == IDLE && !backed && flying[txn] == 0 ->
        check_at_rest(); phase = GROWING; backed = 1; broadcast(GROW) }
    :: phase == FAILED -> break
    od
}

proctype Scheduler(byte r) {
    byte t;
    mtype entry, op;
end: do
    :: d_step { LOCAL_DONE && nempty(stream[r]) ->
        stream[r]?entry, t, op;
        flying[t] = flying[t] - (entry -> 1 : 0);
        step(r, entry, t, op);
        t = 0; entry = 0; op = 0 }
    od
}

proctype Device(byte r) {
end: do
    :: d_step { LOCAL_DONE && busy[r] -> REQUIRE(S4, mapped[r]); busy[r] = 0 }
    od
}

/* One answer of the open transaction reaches the leader. */
inline take(r, what) {
    if
    :: phase == GROWING && what == MAPPED ->
        yes = yes | BIT(r);
        if :: yes == ALL -> phase = READY :: else fi
    :: phase == DRAINING && what == DRAINED ->
        yes = yes | BIT(r);
        if :: yes == ALL -> phase = UNMAPPING; broadcast(UNMAP) :: else fi
    :: phase == UNMAPPING && what == UNMAPPED ->
        yes = yes | BIT(r);
#ifdef MUTANT_M9
        send_down(r, RELEASE);
#endif
        if :: yes == ALL -> phase = RELEASING; broadcast(RELEASE) :: else fi
    :: phase == UNMAPPING && what == UNMAP_FAILED ->
        phase = RESTORING;
#ifdef MUTANT_M8_ONLY_FAILED
        yes = ALL & ~BIT(r); send_down(r, RESTORE)
#else
        broadcast(RESTORE)
#endif
    :: phase == RESTORING && what == RESTORED ->
        yes = yes | BIT(r);
#ifdef MUTANT_M8_PUBLISH_EARLY
        yes = ALL;
#endif
        if :: yes == ALL -> phase = READY :: else fi
#ifdef MUTANT_M8_LATE_UNMAPPED
    :: phase == RESTORING && what == UNMAPPED ->
        yes = yes | BIT(r);
        if :: yes == ALL -> phase = READY :: else fi
#endif
    :: phase == RESTORING && what == RESTORE_FAILED -> phase = FAILED
    :: phase == RELEASING && what == RELEASED ->
        yes = yes | BIT(r);
        if :: yes == ALL -> backed = 0; close_transaction() :: else fi
    :: phase == RELEASING && what == RELEASE_FAILED -> phase = FAILED
    :: else                     /* late or doubled: dropped (M8) */
    fi
}

proctype Reader(byte r) {
    byte x, t;
    mtype what;
end: do
    :: d_step { LOCAL_DONE && nempty(up[r]) ->
        up[r]?what, t;
        flying[t]--;
        if :: CURRENT(t, what) && OPEN -> take(r, what) :: else fi;
        t = 0; what = 0 }
    od
}

inline answer(r, t, what) {
#ifdef LOSS
    table[r] = what;
    if
    :: up[r]!what, t; flying[t]++; lost = (r == N - 1 -> 0 : lost)
    :: r == N - 1 && !lost -> lost = 1      /* one link loses answers, not two in a row */
    fi
#else
    up[r]!what, t; flying[t]++
#endif
}

inline do_unmap(r, t) {
    REQUIRE(S4, NO_RANK(published) && !used[r] && !busy[r]);
    REQUIRE(S4, retired[r] == t + 1 && drained[r]);     /* its own DRAINED, not cancelled (M4) */
    REQUIRE(S6, handle[r] && mapped[r]);
    if
    :: mapped[r] = 0; answer(r, t, UNMAPPED)
#ifndef NO_FAULTS
    :: mapped[r] = 0; answer(r, t, UNMAP_FAILED)        /* a part is gone */
    :: true -> answer(r, t, UNMAP_FAILED)
#endif
    fi
}

inline do_restore(r, t) {
    REQUIRE(S10, handle[r]);
    if
    :: mapped[r] = 1; answer(r, t, RESTORED)
#ifndef NO_FAULTS
    :: !mapped[r] -> answer(r, t, RESTORE_FAILED)
#endif
    fi
}

inline do_release(r, t) {
    REQUIRE(S4, !mapped[r]);
    if
    :: handle[r] = 0; answer(r, t, RELEASED)            /* nothing to do the second time (S9) */
#ifndef NO_FAULTS
    :: handle[r] -> answer(r, t, RELEASE_FAILED)
#endif
    fi
}

proctype Agent(byte r) {
    byte t;
    mtype kind;
end: do
    :: atomic { (r == 0 || LOCAL_DONE) && nempty(down[r]) ->
        down[r]?kind, t;
        flying[t]--;
        if
        :: kind == GROW ->
            REQUIRE(S6, !handle[r] && !mapped[r]);
            handle[r] = 1; mapped[r] = 1; answer(r, t, MAPPED)
        :: kind == UNMAP -> do_unmap(r, t)
        :: kind == RESTORE -> do_restore(r, t)
        :: kind == RELEASE -> do_release(r, t)
        fi;
        t = 0; kind = 0 }
    :: atomic { LOCAL_DONE && retired[r] && !drained[r] && !busy[r] ->
        drained[r] = 1; t = retired[r] - 1; answer(r, t, DRAINED); t = 0 }
#ifdef MUTANT_RETIRE_LOCAL      /* each rank decides from its own free list, when it likes */
    :: d_step { LOCAL_DONE && phase == DRAINING && !retired[r] && published[r] && !used[r] ->
        published[r] = 0; retired[r] = txn + 1 }
#endif
    od
}

#ifdef LOSS
/* The deadline: a silent rank is asked (QUERY, shown in detail in grow.pml) or gets RELEASE again. */
proctype Clock() {
    byte x;
end: do
    :: d_step { LOCAL_DONE && (phase == UNMAPPING || phase == RESTORING || phase == GROWING) &&
                !HAS(yes, N - 1) && len(down[N - 1]) + len(up[N - 1]) == 0 ->
        take(N - 1, table[N - 1]) }
    :: d_step { LOCAL_DONE && phase == DRAINING && !overdue &&
                !HAS(yes, N - 1) && drained[N - 1] && len(up[N - 1]) == 0 ->
        overdue = 1 }
    :: d_step { LOCAL_DONE && phase == RELEASING &&
                !HAS(yes, N - 1) && len(down[N - 1]) + len(up[N - 1]) == 0 ->
        send_down(N - 1, RELEASE) }
    od
}
#endif

init {
    byte i;
    atomic {
        do
        :: i < N ->
            run Agent(i); run Reader(i); run Device(i);
            if :: i > 0 -> run Scheduler(i) :: else fi;
            i++
        :: else -> break
        od;
        i = 0;
#ifdef LOSS
        run Clock();
#endif
        run LeaderScheduler()
    }
}

ltl reclaim_ends { [] (RECLAIMING -> <> (phase == IDLE || phase == FAILED)) }
ltl grown { [] (phase == GROWING -> <> (phase == IDLE)) }
