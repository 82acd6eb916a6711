/* The protocol of the peer transport (docs/peer_protocol.md) for Spin: every interleaving of RANKS ranks over EXCHANGES
 * exchanges. check_meetings.py runs it, and the mutants that it must refuse:
 *
 *   COPIES=1                one copy of what is exchanged
 *   WAIT_ONE_BEFORE         a rank goes on when the peers have come to the meeting before
 *   ARRIVE_BEFORE_WRITING   the flag is set before the data
 *   ARRIVE_BEFORE_READING   a rank comes to the next meeting while its reads still run (kernels that overlap)
 *   NO_RELEASE              the flag may be seen before the data
 *   NAME_ANY                who gives up names any rank that is missing, be it one that waits itself (with DEATH)
 *
 * DEATH: the last rank may stop for ever at any point; the others must end, and name it.
 * OTHER_CALL: the last rank comes to the second meeting for something else than the others; all must find it there.
 *   COMPARE_LATER         the flag of a later meeting is compared as well: who is a meeting ahead is taken for the culprit
 *
 * Memory is weaker than the steps of the model: what an owner has written may be seen by a peer at once, later, or not before
 * the owner's release. `newest` is what the owner wrote, `seen` what a peer is sure to see.
 */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef EXCHANGES
#define EXCHANGES 4
#endif
#ifndef COPIES
#define COPIES 2
#endif
#ifdef WAIT_ONE_BEFORE
#define PASSED(have, meeting) (have + 1 >= meeting)
#else
#define PASSED(have, meeting) (have >= meeting)
#endif
#define VICTIM (RANKS - 1)
#ifdef DEATH
#define MAY_DIE if :: me == VICTIM -> goto dead :: true fi
#else
#define MAY_DIE skip
#endif

/* Data is the number of its exchange + 1; 0 is what an area is cleared to. */
byte newest[RANKS * COPIES];        /* [owner, copy] */
byte seen[RANKS * RANKS * COPIES];  /* [peer, owner, copy] */
byte arrivals[RANKS * RANKS];       /* [at, of]: meetings that a rank has come to, as another one sees it; none at itself */
byte calls[RANKS * RANKS];          /* the same: what it came for */
bool differ[RANKS];                 /* that a rank has found that another one came for something else */
byte ended[RANKS];                  /* rank + 1 of the one that ended the group, as a rank is told */

/* What a rank comes to a meeting for. */
#ifdef OTHER_CALL
#define CALL(rank, meeting) (meeting == 2 && rank == VICTIM -> 99 : meeting)
#else
#define CALL(rank, meeting) (meeting)
#endif
#ifdef COMPARE_LATER
#define COMPARED(flag, meeting) (flag >= meeting)
#else
#define COMPARED(flag, meeting) (flag == meeting)
#endif

#define WRITE(copy, value) newest[me * COPIES + (copy)] = value

/* A peer that comes to see the flag sees what was written before it. */
inline arrive(meeting) {
  p = 0;
  do
  :: p < RANKS ->
     MAY_DIE;
     d_step {
#ifndef NO_RELEASE
       c = 0;
       do
       :: c < COPIES -> seen[(p * RANKS + me) * COPIES + c] = newest[me * COPIES + c]; c++
       :: else -> break
       od;
#endif
       if
       :: p != me -> arrivals[p * RANKS + me] = meeting; calls[p * RANKS + me] = CALL(me, (meeting))
       :: else
       fi;
       p++
     }
  :: else -> break
  od
}

/* guilty: a rank that has not come, and does not wait for somebody itself in the last meeting that it has come to (blame.h). */
inline find_guilty(meeting) {
  guilty = 0;
  d_step {
    p = 0;
    do
    :: p < RANKS && guilty == 0 ->
       c = 0;
       value = 0;
       do
       :: c < RANKS ->
          if :: c != p && arrivals[p * RANKS + c] < arrivals[me * RANKS + p] -> value = 1 :: else fi;
          c++
       :: else -> break
       od;
#ifdef NAME_ANY
       value = 0;
#endif
       if :: p != me && arrivals[me * RANKS + p] < meeting && value == 0 -> guilty = p + 1 :: else fi;
       p++
    :: else -> break
    od
  }
}

inline wait_for_all(meeting) {
  p = 0;
  do
  :: p < RANKS ->
     if
     :: p == me -> p++
     :: p != me && PASSED(arrivals[me * RANKS + p], meeting) ->
        d_step {
          if
          :: COMPARED(arrivals[me * RANKS + p], meeting) && calls[me * RANKS + p] != CALL(me, (meeting)) ->
             differ[me] = true
          :: else
          fi;
          p++
        }
        if :: differ[me] -> goto over :: else fi
#ifdef DEATH
     :: ended[me] != 0 -> goto over
     :: timeout -> /* nothing moves any more: the clock runs out, for any of those that wait */
        find_guilty(meeting);
        assert(guilty != 0);
        p = 0;
        do
        :: p < RANKS -> ended[p] = guilty; p++ /* at once for itself, sooner or later for the others */
        :: else -> break
        od;
        goto over
#endif
     fi
  :: else -> break
  od
}

inline read_all(exchange) {
  p = 0;
  do
  :: p < RANKS ->
     MAY_DIE;
     atomic {
       c = p * COPIES + (exchange) % COPIES;
       if
       :: p == me -> value = newest[c]
       :: p != me -> value = seen[me * RANKS * COPIES + c]
       :: p != me -> value = newest[c]; seen[me * RANKS * COPIES + c] = value
       fi;
       assert(value == (exchange) + 1);
       p++
     }
  :: else -> break
  od
}

proctype Rank(byte me) {
  byte e, p, c, value, guilty;
  do
  :: e < EXCHANGES ->
     MAY_DIE;
#ifdef ARRIVE_BEFORE_WRITING
     arrive(e + 1);
     WRITE(e % COPIES, e + 1);
#else
     WRITE(e % COPIES, e + 1);
     arrive(e + 1);
#endif
#ifdef ARRIVE_BEFORE_READING
     if
     :: e > 0 -> read_all(e - 1)
     :: else
     fi;
#endif
     wait_for_all(e + 1);
     /* The copy of the next exchange is cleared for values that are gathered with atomics. */
     if
     :: COPIES > 1 -> WRITE((e + 1) % COPIES, 0)
     :: else
     fi;
#ifndef ARRIVE_BEFORE_READING
     read_all(e);
#endif
     e++
  :: else -> break
  od;
#ifdef OTHER_CALL
  assert(false); /* nobody gets through */
#endif
over:
#ifdef OTHER_CALL
  assert(e == 1);
#else
  assert(!differ[me]);
#endif
#ifdef DEATH
  assert(ended[me] == 0 || ended[me] == VICTIM + 1);
#endif
dead:
  skip
}

init {
  atomic {
    byte r = 0;
    do
    :: r < RANKS -> run Rank(r); r++
    :: else -> break
    od
  }
}
