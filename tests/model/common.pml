/*
 * Words shared by all models: ranks, properties, transaction numbers.
 *
 * A property is a hidden variable (not part of the state) that is always 0, so that
 * spin's own report of a violated assertion names the property: (S2||(...)).
 */

#ifndef FOLLOWERS
#define FOLLOWERS 2
#endif
#define N (FOLLOWERS + 1)               /* ranks; rank 0 is the leader */
#define ALL ((1 << N) - 1)
#define BIT(x) (1 << (x))
#define HAS(set, x) (((set) >> (x)) & 1)

#ifdef SHORTEST
#define hidden      /* breadth-first search, for shortest counterexamples, knows no hidden variables */
#endif
hidden byte S1;     /* no two ranks take different verdicts for one transaction */
hidden byte S2;     /* publish implies MAPPED from every rank, of that epoch and transaction */
hidden byte S3;     /* a published run is mapped on every live rank */
hidden byte S4;     /* a run is unmapped only after the last step that may touch it */
hidden byte S5;     /* the sequence (operation, block ids) is equal on all ranks */
hidden byte S6;     /* a run is in one state and owned by at most one transaction */
hidden byte S7;     /* a grow is all or nothing; after a refusal nothing it created is held */
hidden byte S8;     /* nothing of an older epoch changes state */
hidden byte S9;     /* duplicates change nothing and get the same answer */
hidden byte S10;    /* at rest the handles held equal the leader's count, per rank */
hidden byte S12;    /* log indices only grow; entries apply in order */
hidden byte CAPACITY;   /* rule M6: published + GROWABLE never exceeds what every rank can back */

#define REQUIRE(property, condition) assert(property || (condition))

/*
 * Transaction numbers are never reused by the code. Here they are taken from 0..NUMBERS-1 in turn,
 * and a number is taken again only when no message that names it is in flight, so that runs of the
 * protocol are unbounded while the number of states is not. NUMBERS - 1 older transactions can have
 * late messages in flight beside the open one.
 */
#ifndef NUMBERS
#define NUMBERS 2
#endif
