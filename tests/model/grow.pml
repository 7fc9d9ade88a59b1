/*
 * Growth: RESERVE, vote, MAP, publish or retain, identical retries, quarantine; refusals, the growth
 * deadline, lost answers, bounded queries. Runs 0 and 1 are neighbours and share a border granule.
 * Published runs go back through an idealised reclaim (reclaim.pml has the real one), so that ids are
 * reused for ever and the search covers unbounded histories.
 *
 * One process per line of control: the leader's state machine, one reader per link at the leader, and
 * on each rank a link thread (answers queries from a table) and a worker (makes the driver calls).
 */
#include "common.pml"

#ifndef TRIES
#define TRIES 2                 /* identical retries before quarantine */
#endif
#ifndef QUERIES
#define QUERIES 2               /* queries of one phase that may stay without a reply */
#endif
#ifndef RUNS
#define RUNS 2
#endif
#define EVERY_RUN ((1 << RUNS) - 1)

mtype = { NOTHING, RESERVE, MAP, ABORT,
          RUNNING, RESERVED, REFUSED, MAPPED, MAP_FAILED,
          IDLE, VOTING, MAPPING, READY, FAILED };

/* Links. An answer and the reply to a query use the same words; the bit tells them apart. */
chan down[N]  = [2 * NUMBERS + 1] of { mtype, byte, byte }; /* kind, txn, runs */
chan query[N] = [2] of { byte };                            /* txn */
chan up[N]    = [4 * NUMBERS] of { bit, byte, mtype };      /* is a reply, txn, phase */
byte flying[NUMBERS];           /* messages in flight per transaction number */

/* The leader. */
mtype phase = IDLE;
byte txn;                       /* number of the open transaction, or of the next one */
byte runs;                      /* runs of the open transaction */
byte yes;                       /* ranks that have answered yes in this phase */
byte no;                        /* ranks that have answered MAP_FAILED */
byte published;
byte quarantined;
byte set_of[2];                 /* retained: the set of runs that was granted together, else 0 */
byte tries[2];                  /* identical retries that failed */
byte unreplied[N];              /* queries of this phase without a reply */
byte asked;                     /* ranks with a query outstanding */
#ifdef MUTANT_M7_EARLY_RETRY
byte late_runs, late_yes, late_txn; /* declared retained before every rank had answered */
#endif

/* What each rank holds. */
byte handle[N];                 /* interior handles */
bit  border[N];                 /* handle of the granule that runs 0 and 1 share */
byte mapped[N];                 /* runs; the border is mapped when a run beside it is */
byte group[N * 2];              /* set of runs under which a run is held unpublished, else 0 */
byte made[N];                   /* interior handles that the transaction in hand created */
bit  made_border[N];
bit  adopted[N];                /* the transaction in hand found its runs retained */
byte held_txn[N];               /* transaction in hand */
mtype table[N] = NOTHING;       /* its phase: what the link thread knows */

/* Ghosts: verdicts and successful maps per transaction number, as sets of ranks. */
byte committed[NUMBERS], aborted[NUMBERS], did_map[NUMBERS];

#define OPEN (phase == VOTING || phase == MAPPING || phase == READY)
#define RETAINED ((set_of[0] -> 1 : 0) | (set_of[1] -> 2 : 0))
#define GROUP(r, p) group[(r) * 2 + (p)]
#ifdef MUTANT_ADOPT_HALF
#define FRESH(m) (((m) & (published | quarantined)) == 0)
#else
#define FRESH(m) (((m) & (published | quarantined | RETAINED)) == 0)
#endif
#ifdef MUTANT_B                 /* answers carry no transaction number */
#define CURRENT(t) true
#else
#define CURRENT(t) ((t) == txn)
#endif
#if FOLLOWERS == 3
#define WORKED_OFF (len(down[0]) + len(down[1]) + len(down[2]) + len(down[3]) == 0)
#define HEARD (len(up[0]) + len(up[1]) + len(up[2]) + len(up[3]) == 0)
#else
#define WORKED_OFF (len(down[0]) + len(down[1]) + len(down[2]) == 0)
#define HEARD (len(up[0]) + len(up[1]) + len(up[2]) == 0)
#endif

/* The leader's own worker is not modelled as slow: nothing else moves while it has work. */
#define LOCAL_DONE (len(down[0]) == 0)

#define FOREACH(i, n) i = 0; do :: i < (n) ->
#define END(i) i++ :: else -> break od; i = 0

/* S10 with S7 and L3: what is held at rest, border granule once, is what the leader counts. */
inline check_at_rest() {
    if
    :: WORKED_OFF ->
        FOREACH(x, N)
            REQUIRE(S10, handle[x] == (published | quarantined | RETAINED));
            REQUIRE(S10, border[x] == (handle[x] != 0));
        END(x)
    :: else
    fi
}

inline send_down(r, kind) { down[r]!kind, txn, runs; flying[txn]++ }

inline next_phase() {
    yes = 0; no = 0; asked = 0;
    FOREACH(x, N) unreplied[x] = 0; END(x)
}

inline broadcast(kind) {
    next_phase();
    FOREACH(x, N) send_down(x, kind); END(x)
}

inline close_transaction() {
    next_phase();
    phase = IDLE; runs = 0; txn = (txn + 1) % NUMBERS
}

/* ABORT goes to every rank that was asked, answered or not (M3). */
inline abort_all() {
    FOREACH(x, N)
#if defined(MUTANT_M3_ANSWERED_ONLY)
        if :: HAS(yes, x) -> send_down(x, ABORT) :: else fi;
#elif !defined(MUTANT_C)
        send_down(x, ABORT);
#endif
    END(x);
    close_transaction()
}

/* Ranks forget a transaction that has ended with every answer in. */
inline forget() {
    FOREACH(x, N)
        table[x] = NOTHING; made[x] = 0; made_border[x] = 0; adopted[x] = 0; held_txn[x] = 0;
    END(x)
}

inline publish(t, m) {
    REQUIRE(S6, (m & published) == 0);
    REQUIRE(S6, !OPEN || t == txn || (runs & m) == 0);
    REQUIRE(S2, did_map[t] == ALL);
    committed[t] = ALL;
    REQUIRE(S1, aborted[t] == 0);
    published = published | m;
    FOREACH(x, N)
        REQUIRE(S3, (m & ~mapped[x]) == 0);
        if :: (m & 1) -> GROUP(x, 0) = 0 :: else fi;
        if :: (m & 2) -> GROUP(x, 1) = 0 :: else fi;
    END(x);
    if :: (m & 1) -> set_of[0] = 0; tries[0] = 0 :: else fi;
    if :: (m & 2) -> set_of[1] = 0; tries[1] = 0 :: else fi
}

/* Every rank has answered MAP and one said no: retained; after TRIES failed retries quarantined. */
inline retain() {
    FOREACH(x, RUNS)
        if
        :: HAS(runs, x) && !set_of[x] -> set_of[x] = runs
        :: HAS(runs, x) && set_of[x] && tries[x] + 1 < TRIES -> tries[x]++
        :: HAS(runs, x) && set_of[x] && tries[x] + 1 >= TRIES ->
            quarantined = quarantined | BIT(x); set_of[x] = 0; tries[x] = 0
        :: else
        fi;
    END(x)
}

/* The leader takes one answer, or one reply to a query, of the open transaction. */
inline take(r, is_reply, what) {
    if
    :: is_reply ->
        asked = asked & ~BIT(r);
#ifndef GAP_TWO_QUERIES_IN_ALL
        unreplied[r] = 0;
#endif
    :: else
    fi;
    if
    :: phase == VOTING && what == RESERVED ->
        yes = yes | BIT(r);
        if :: yes == ALL -> broadcast(MAP); phase = MAPPING :: else fi
    :: phase == VOTING && (what == REFUSED || what == RUNNING) -> abort_all()
    :: phase == MAPPING && (what == MAPPED || what == MAP_FAILED) ->
        if :: what == MAPPED -> yes = yes | BIT(r) :: else -> no = no | BIT(r) fi;
        if
        :: yes == ALL -> phase = READY
        :: no && (yes | no) == ALL -> retain(); forget(); close_transaction()
        :: else
        fi
    :: else                     /* a duplicate, or RUNNING: the MAP stays pending */
    fi
}

proctype Reader(byte r) {
    byte x, t;
    bit is_reply;
    mtype what;
end: do
    :: d_step { LOCAL_DONE && nempty(up[r]) ->
        up[r]?is_reply, t, what;
        flying[t]--;
        if
#ifdef MUTANT_M7_EARLY_RETRY
        :: late_runs && t == late_txn && what == MAPPED -> late_yes = late_yes | BIT(r)
#endif
        :: CURRENT(t) && OPEN -> take(r, is_reply, what)
        :: else                 /* late: changes nothing */
        fi;
        t = 0; is_reply = 0; what = 0 }
    od
}

inline give_back(m) {
    check_at_rest();
    published = published & ~(m);
    FOREACH(x, RUNS) if :: HAS(m, x) -> set_of[x] = 0; tries[x] = 0 :: else fi; END(x);
    FOREACH(x, N)
        handle[x] = handle[x] & ~(m); mapped[x] = mapped[x] & ~(m);
        if :: (m) & 1 -> GROUP(x, 0) = 0 :: else fi;
        if :: (m) & 2 -> GROUP(x, 1) = 0 :: else fi;
        border[x] = (handle[x] != 0);
    END(x);
    m = 0
}

/* One link loses answers and replies; the other ranks are merely slow. */
#define LOSSY (N - 1)
#define SILENT ((phase == VOTING || phase == MAPPING) && !HAS(yes | no, LOSSY))
#define UNHEARD (HAS(asked, LOSSY) && len(query[LOSSY]) == 0 && !up[LOSSY]??[1, eval(txn), _])

proctype Leader() {
    byte x, m;
    do
    /* A new transaction: fresh runs, or the identical runs of a retained set. */
    :: atomic { LOCAL_DONE && phase == IDLE && flying[txn] == 0 &&
#ifdef MUTANT_M7_EARLY_RETRY
                !(late_runs && late_txn == txn) &&
#endif
                (FRESH(1) || RUNS == 2 && FRESH(2) || set_of[0] || set_of[1]) ->
        if
        :: FRESH(1) -> runs = 1
#if RUNS == 2
        :: FRESH(2) -> runs = 2
        :: FRESH(3) -> runs = 3
#endif
        :: set_of[0] -> runs = set_of[0]
        :: set_of[1] && set_of[1] != 3 -> runs = set_of[1]
        fi;
        d_step {
            m = runs; runs = 0;
            check_at_rest();
            runs = m; m = 0;
            committed[txn] = 0; aborted[txn] = 0; did_map[txn] = 0;
            broadcast(RESERVE);
            phase = VOTING } }
#ifndef NO_FAULTS
    /* The growth deadline with votes missing: the caller sees an ordinary miss. */
    :: d_step { LOCAL_DONE && phase == VOTING -> abort_all() }
#endif
#ifdef LOSS
    /* The deadline: ask the silent rank; ask again, or give up, when no reply came in time. */
    :: d_step { LOCAL_DONE && SILENT && len(query[LOSSY]) < 2 && !HAS(asked, LOSSY) && unreplied[LOSSY] < QUERIES ->
        query[LOSSY]!txn; flying[txn]++; asked = asked | BIT(LOSSY); unreplied[LOSSY]++ }
    :: d_step { LOCAL_DONE && SILENT && UNHEARD && !(phase == MAPPING && unreplied[LOSSY] >= QUERIES) ->
        asked = asked & ~BIT(LOSSY) }
    :: d_step { LOCAL_DONE && SILENT && UNHEARD && phase == MAPPING && unreplied[LOSSY] >= QUERIES ->
        phase = FAILED }
#endif
#ifdef MUTANT_PUBLISH_AFTER_RESERVE
    :: d_step { LOCAL_DONE && phase == MAPPING -> phase = READY }
#endif
#ifdef MUTANT_M3_ABORT_AFTER_MAP
    :: d_step { LOCAL_DONE && phase == MAPPING -> abort_all() }
#endif
#ifdef MUTANT_M7_EARLY_RETRY
    :: d_step { LOCAL_DONE && phase == MAPPING && late_runs == 0 ->
        late_runs = runs; late_yes = yes; late_txn = txn; retain(); close_transaction() }
    :: d_step { late_yes == ALL ->
        publish(late_txn, late_runs); late_runs = 0; late_yes = 0; late_txn = 0 }
#endif
    /* The mark that carries PUBLISH is broadcast some time after the last MAPPED. */
    :: d_step { LOCAL_DONE && phase == READY -> publish(txn, runs); forget(); close_transaction() }
    /* A run, or a retained set, leaves by an idealised reclaim: a transaction on the same FIFO links,
       so whatever was sent before has been worked off. */
    :: d_step { LOCAL_DONE && phase == IDLE && WORKED_OFF && (published & 1) -> m = 1; give_back(m) }
    :: d_step { LOCAL_DONE && phase == IDLE && WORKED_OFF && (published & 2) -> m = 2; give_back(m) }
    :: d_step { LOCAL_DONE && phase == IDLE && WORKED_OFF && set_of[0] -> m = set_of[0]; give_back(m) }
    :: d_step { LOCAL_DONE && phase == IDLE && WORKED_OFF && set_of[1] -> m = set_of[1]; give_back(m) }
    :: phase == FAILED -> break
    :: d_step { LOCAL_DONE && phase == IDLE && WORKED_OFF && HEARD && quarantined == EVERY_RUN ->
        check_at_rest() } -> break
    od
}

inline answer(r, t, what) {
    table[r] = what;
    if
    :: up[r]!0, t, what; flying[t]++
#ifdef LOSS
    :: r == LOSSY               /* the answer is lost */
#endif
    fi
}

/* Create what is missing for the runs m; a run held unpublished is adopted by the identical set only. */
inline do_reserve(r, t, m) {
    d_step {
        FOREACH(x, RUNS)
            REQUIRE(S6, !HAS(m, x) || GROUP(r, x) == 0 || GROUP(r, x) == m);
            REQUIRE(S6, !HAS(m, x) || GROUP(r, x) != 0 || !HAS(handle[r], x));
        END(x);
        held_txn[r] = t;
        adopted[r] = (handle[r] & m) != 0;
        made[r] = 0; made_border[r] = 0
    }
    if
    :: d_step { true ->
        made[r] = m & ~handle[r]; made_border[r] = !border[r];
        handle[r] = handle[r] | m; border[r] = 1;
        FOREACH(x, RUNS) if :: HAS(m, x) -> GROUP(r, x) = m :: else fi; END(x) };
        answer(r, t, RESERVED)
#ifndef NO_FAULTS
    :: true ->                  /* exhausted part way: everything created here has been given back */
        REQUIRE(S7, adopted[r] || (handle[r] & m) == 0);
        answer(r, t, REFUSED)
#endif
    fi
}

inline do_map(r, t, m) {
    REQUIRE(S7, held_txn[r] == t && table[r] == RESERVED);
    if
    :: mapped[r] = mapped[r] | m; did_map[t] = did_map[t] | BIT(r); answer(r, t, MAPPED)
#ifndef NO_FAULTS
    :: true ->                  /* a failed batch: what is mapped stays mapped */
        if
        :: mapped[r] = mapped[r] | m            /* the fill failed */
        :: m == 3 -> mapped[r] = mapped[r] | 1  /* the second run failed */
        :: true
        fi;
#ifdef MUTANT_UNMAP_ONLINE
        REQUIRE(S4, (mapped[r] & m) == 0);      /* an unmap that nobody drained for */
        mapped[r] = mapped[r] & ~m;
#endif
        answer(r, t, MAP_FAILED)
#endif
    fi
}

/* Give back only what this transaction created and has not mapped (M3). */
inline do_abort(r, t, m) {
    d_step {
        aborted[t] = aborted[t] | BIT(r);
        REQUIRE(S1, committed[t] == 0);
        if
        :: held_txn[r] == t && (table[r] == RESERVED || table[r] == MAPPED || table[r] == MAP_FAILED) ->
#ifdef MUTANT_M3_ALL_HANDLES
            made[r] = m;
#endif
            handle[r] = handle[r] & ~(made[r] & ~mapped[r]);
            if :: made_border[r] && mapped[r] == 0 -> border[r] = 0 :: else fi;
            FOREACH(x, RUNS)
                if :: HAS(made[r] & ~mapped[r], x) -> GROUP(r, x) = 0 :: else fi;
            END(x);
#ifdef MUTANT_M3_ALL_HANDLES
            handle[r] = handle[r] & ~m;
#endif
            REQUIRE(S7, adopted[r] || (handle[r] & m) == 0)
        :: else
        fi;
        table[r] = NOTHING; made[r] = 0; made_border[r] = 0; adopted[r] = 0; held_txn[r] = 0
    }
}

proctype Worker(byte r) {
    byte x, t, m;
    mtype kind;
end: do
    :: atomic {
#ifdef MUTANT_I                 /* the link is not FIFO: several tags or threads */
        if
        :: down[r]??RESERVE, t, m; kind = RESERVE
        :: down[r]??MAP, t, m; kind = MAP
        :: down[r]??ABORT, t, m; kind = ABORT
        fi;
#else
        (r == 0 || LOCAL_DONE) && nempty(down[r]) ->
        down[r]?kind, t, m;
#endif
        flying[t]--;
        if
        :: kind == RESERVE -> do_reserve(r, t, m)
        :: kind == MAP -> do_map(r, t, m)
        :: kind == ABORT -> do_abort(r, t, m)
        fi;
        t = 0; m = 0; kind = 0 }
#ifdef MUTANT_D                 /* gives up alone after its last yes */
    :: d_step { table[r] == MAPPED ->
        mapped[r] = mapped[r] & ~made[r]; handle[r] = handle[r] & ~made[r];
        table[r] = NOTHING; made[r] = 0 }
#endif
    od
}

#ifdef LOSS
proctype LinkThread(byte r) {
    byte t;
    mtype what;
end: do
    :: atomic { LOCAL_DONE && nempty(query[r]) ->
        query[r]?t;
        flying[t]--;
        what = (held_txn[r] == t -> table[r] : NOTHING);
        if
        :: d_step { down[r]??[RESERVE, eval(t), _] || down[r]??[MAP, eval(t), _] -> what = RUNNING }
        :: !(down[r]??[RESERVE, eval(t), _] || down[r]??[MAP, eval(t), _])
        fi;
        REQUIRE(S9, t != txn || phase == IDLE || what != NOTHING);
        if
        :: up[r]!1, t, what; flying[t]++
        :: true                 /* the reply is lost */
        fi;
        t = 0; what = 0 }
    od
}
#endif

init {
    byte i;
    atomic {
        do
        :: i < N ->
            run Worker(i); run Reader(i); i++
        :: else -> break
        od;
        i = 0;
#ifdef LOSS
        run LinkThread(LOSSY);
#endif
        run Leader()
    }
}

ltl verdict { [] (OPEN -> <> (phase == IDLE || phase == FAILED)) }
ltl commits { [] (phase == VOTING -> <> (phase == READY)) }
