/*
 * The protocol of leases, fences and protected writes, for the model checker spin. docs/model.md says what is modelled,
 * how large, and how to run it. What is checked holds for every interleaving of the steps below: a label, or an option
 * that begins with atomic, is one step; between two of them anybody else may act, the clock move, or the server fail. A
 * holder may so pause anywhere and write late. It never stops of its own accord, as a real one would at its deadline.
 *
 * Which part: LEASE  leases in time, and writes of strength Live and InTx
 *             ROWS   Fenced writes; anybody may be granted the lease at any moment, so that nothing but fences protects
 *             FAIL   leases and Fenced writes through crashes and promotions of a standby that lags
 * -DM_...     breaks one rule (a mutant);  -DONLY=property checks that one alone
 * -DGOAL=name makes reaching the place of that name an error, to see that it is reached
 */
#if defined(LEASE)
#define TIMED
#define LIVE
#ifndef HOLDERS
#define HOLDERS 3
#endif
#ifndef DRAWS
#define DRAWS 3
#endif
#ifndef TIME
#define TIME 4
#endif
#define TTL 2
#define NAMES 1
#elif defined(ROWS)
#ifndef HOLDERS
#define HOLDERS 3
#endif
#ifndef DRAWS
#define DRAWS 4
#endif
#define NAMES 1
#elif defined(FAIL)
#define TIMED
#ifndef HOLDERS
#define HOLDERS 3
#endif
#ifndef DRAWS
#define DRAWS 4
#endif
#ifndef TIME
#define TIME 1
#endif
#ifndef TTL
#define TTL 1
#endif
#ifndef NAMES
#define NAMES 1
#endif
#ifndef PROMOTIONS
#define PROMOTIONS 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#endif

/* Properties and goals have numbers for the preprocessor, and variables so that pan prints their names. */
#define N_any              0
#define N_fence_shared     1 /* no two grants share a fence */
#define N_lease_falls      2 /* a lease's fence never falls */
#define N_two_live         3 /* at most one grant of a name is live, by the database's clock and in its order of commits */
#define N_short_grant      4 /* a grant lasts its ttl from when its row was locked: waiting costs nothing of it */
#define N_expired_passes   5 /* what had expired when the lease row was locked is neither renewed nor written under */
#define N_newer_grant      6 /* no write of strength Live or InTx commits after a newer grant */
#define N_row_falls        7 /* a row's fence never falls */
#define N_stale_overwrites 8 /* no write overwrites what a newer fence has written or sealed */
#define N_read_after_seal  9 /* what a holder read after its seal is still so when its own write is applied */
#define N_deleted_back    10 /* no older holder brings a deleted row back */
#define N_applied_twice   11 /* a repeat under rule once is applied once at most */
#define N_told_applied    12 /* who is told "already applied" has written the row under this grant */
#define N_lost_wins       13 /* no grant that a promotion forgot overwrites what a later grant wrote */
#define N_lawful_refused  14 /* the holder of the newest grant, while it lasts, is never refused as stale */
hidden byte fence_shared, lease_falls, two_live, short_grant, expired_passes, newer_grant, row_falls, stale_overwrites,
    read_after_seal, deleted_back, applied_twice, told_applied, lost_wins, lawful_refused;

#define N_none              0
#define N_takeover          1
#define N_renewed           2
#define N_renewal_refused   3
#define N_late_release      4
#define N_live_applied      5
#define N_live_refused      6
#define N_stale_refused     8
#define N_told_again        9
#define N_sealed_refuses   10
#define N_sealed_written   11
#define N_insert_refused   12
#define N_back_by_newer    13
#define N_promoted_grant 14
#define N_lost_written     15
#define N_lost_refused     16
#define N_second_jump      17
hidden byte takeover, renewed, renewal_refused, late_release, live_applied, live_refused, stale_refused,
    told_again, sealed_refuses, sealed_written, insert_refused, back_by_newer, promoted_grant, lost_written,
    lost_refused, second_jump;

#ifndef ONLY
#define ONLY any
#endif
#ifndef GOAL
#define GOAL none
#endif
#define NUMBER(p) N_##p
#define THE(p) NUMBER(p)
#define CHECK(p, ok) if :: ((THE(ONLY) == N_any || THE(ONLY) == N_##p) && !(ok)) -> assert(p) :: else fi
#define REACHED(g, here) if :: (THE(GOAL) == N_##g && (here)) -> assert(g) :: else fi

/* ---- The database: what is committed. One row belongs to each lease name. */

typedef Database {
	byte fence[NAMES]; byte token[NAMES]; byte owner[NAMES]; byte expires[NAMES]; bool released[NAMES]; /* fence.lease */
	byte seen;         /* the highest fence in fence.term */
	byte terms;        /* the tokens in fence.term, one bit each */
	byte seq;          /* fence.fence_seq: no part of any transaction */
	byte row[NAMES];   /* last_fence */
	bool there[NAMES];
	byte tomb[NAMES];  /* fence.tombstone */
	byte high[NAMES];  /* for the properties: the highest fence that wrote, sealed or deleted the row */
	byte by[NAMES]     /* and the token of the last that did */
}
Database db;

/* Row locks: FOR UPDATE, FOR NO KEY UPDATE and FOR KEY SHARE (a bit each) on the lease; the data row; the key's floor. */
byte for_update[NAMES], no_key_update[NAMES], key_share[NAMES], row_lock[NAMES], floor_lock[NAMES];
byte now;   /* clock_timestamp() */
byte draws; /* fences drawn, by whomever; also makes tokens, as unlike each other as random ones */

/* For the properties alone. */
short issued;        /* the fences granted so far, one bit each, forgotten ones too */
byte told[HOLDERS];  /* the end of this holder's grant by the database's clock, 0 once it has passed or was given up */
byte changed;        /* whose reading after its seal is no longer true, one bit each */

#define BIT(n) (1 << (n))
#define EXPIRED(at) (db.expires[n] <= (at))
#define HELD(at) (db.token[n] && !db.released[n] && !EXPIRED(at))
#define MINE (db.token[n] == token && db.fence[n] == fence)
#ifdef TIMED
#define LAWFUL (MINE && told[me] && !gave_up)
#else
#define LAWFUL MINE
#endif

/* ---- Failures end all transactions. A client finds out at its next step. */

#ifdef FAIL
Database standby;   /* an earlier state of db */
Database nothing;   /* what is put there once it plays no part any more */
byte durable_seq;   /* what a crash leaves of db.seq at least */
bool new_server;    /* the server is not the one of the last grant: its start or its timeline differ from fence.epoch */
byte epoch_lock, promotions, crashes;
byte after;         /* the tokens granted since the last promotion */
bool in_tx[HOLDERS];
#define ALIVE in_tx[me]
#define BEGIN in_tx[me] = true
#define BROKEN :: atomic { !in_tx[me] -> end_transaction(); goto rest }
#else
#define ALIVE true
#define BEGIN skip
#define BROKEN
#endif

inline end_transaction()
{
	d_step {
		if :: for_update[n] == me + 1 -> for_update[n] = 0 :: else fi;
		if :: no_key_update[n] == me + 1 -> no_key_update[n] = 0 :: else fi;
		if :: row_lock[n] == me + 1 -> row_lock[n] = 0 :: else fi;
		if :: floor_lock[n] == me + 1 -> floor_lock[n] = 0 :: else fi;
		key_share[n] = key_share[n] & ~BIT(me);
#ifdef FAIL
		if :: epoch_lock == me + 1 -> epoch_lock = 0 :: else fi;
		in_tx[me] = false;
		to = 0;
#endif
		clock = 0; ends = 0; locked = 0; new = 0; drawn = 0; floor = 0; kind = 0; once = false; pinned = false
	}
}

#define FREE_FOR_UPDATE (!for_update[n] && !no_key_update[n] && !key_share[n])
#define FREE_FOR_NO_KEY_UPDATE (!for_update[n] && !no_key_update[n])
#define FREE_FOR_KEY_SHARE (!for_update[n])

inline nextval()
{
#ifdef M_CACHE /* blocks of two a session */
	if
	:: cached -> new = cached; cached = 0
	:: else -> new = db.seq + 2; cached = new + 2; db.seq = cached
	fi;
#else
	db.seq = db.seq + 2; new = db.seq;
#endif
	draws++; drawn = draws
}

/* ---- Predicates of a protected write. */

#define LESS(a, b) ((a) < (b))
#define TAKES LESS
#if defined(M_NO_PREDICATE)
#undef TAKES
#define TAKES(a, b) true
#elif defined(M_GREATER)
#undef TAKES
#define TAKES(a, b) ((a) > (b))
#endif
#ifdef M_ONCE_EQUAL
#define TAKES_ONCE(a, b) ((a) <= (b))
#else
#define TAKES_ONCE(a, b) TAKES(a, b)
#endif
#define TAKEN(a) ((once && TAKES_ONCE(a, fence)) || (!once && (TAKES(a, fence) || (a) == fence)))

#define WRITE 1
#define SEAL 2
#define DELETE 3
#define INSERT 4

#ifdef FAIL /* the rule that takes more */
inline choose_rule() { once = false }
#else
inline choose_rule() { if :: once = true :: once = false fi }
#endif

/* refused_by explains a write that changed nothing: found is the fence of the row, or of its tombstone. */
inline refused_by(found)
{
	CHECK(lawful_refused, !(found > fence && LAWFUL));
	CHECK(told_applied, !(found == fence && once && !mine));
	REACHED(stale_refused, found > fence);
	REACHED(told_again, found == fence && once && mine);
	REACHED(sealed_refuses, found == fence + 1 && found % 2 == 1);
#ifdef FAIL
	REACHED(lost_refused, found > fence && !(db.terms & BIT(token)) && (after & BIT(db.by[n])));
#endif
}

/* apply is the COMMIT of a write to the data row. */
inline apply()
{
	d_step {
		if
		:: kind == INSERT ->
			CHECK(deleted_back, fence >= db.high[n]);
			CHECK(row_falls, fence >= db.tomb[n]);
			REACHED(back_by_newer, db.high[n] < fence)
		:: else ->
			CHECK(stale_overwrites, fence >= db.high[n]);
			CHECK(row_falls, fence - (kind == SEAL) >= db.row[n])
		fi;
#ifdef FAIL
		CHECK(lost_wins, !(!(db.terms & BIT(token)) && (after & BIT(db.by[n]))));
		REACHED(lost_written, !(db.terms & BIT(token)))
#endif
		if
		:: kind == SEAL ->
#ifndef M_SEAL
#ifdef M_SEAL_TO_FENCE
			db.row[n] = fence;
#else
			db.row[n] = fence - 1;
#endif
#endif
			sealed = true; changed = changed & ~BIT(me) /* its RETURNING reads the row */
		:: else ->
			CHECK(read_after_seal, !(sealed && (changed & BIT(me))));
#ifndef FAIL /* what a promotion forgot is applied again, and rightly */
			CHECK(applied_twice, !(once && applied));
			applied = applied || once; mine = true;
#endif
			REACHED(sealed_written, sealed && once);
			sealed = false;
#ifdef ROWS
			changed = 255 & ~BIT(me);
#endif
			if
			:: kind == DELETE ->
				db.there[n] = false; db.row[n] = 0;
#ifndef M_NO_TOMBSTONE
				db.tomb[n] = fence
#endif
			:: else -> db.there[n] = true; db.row[n] = fence
			fi
		fi;
		if :: db.high[n] < fence -> db.high[n] = fence :: else fi;
		db.by[n] = token
	}
}

inline new_grant()
{
	fence = db.fence[n]; token = db.token[n]; gave_up = false; mine = false; applied = false; sealed = false
}

/* ---- The steps of the lease functions. */

#ifdef FAIL
#define SOURCE_IS_FREE (!new_server || !epoch_lock)
#else
#define SOURCE_IS_FREE true
#endif

/* check_source is fence.check_source and the half of fence.jump that finds out how far to go. The clock of the fences,
   microseconds in truth, moves on by four for each fence drawn, which is by two, and is never taken back. */
inline check_source()
{
#if defined(FAIL) && !defined(M_NO_JUMP)
	if
	:: new_server ->
		epoch_lock = me + 1;
#ifdef M_JUMP_COUNTED
		to = db.seq + 4
#else
		to = (db.seq > 4 * draws -> db.seq : 4 * draws)
#endif
	:: else
	fi
#else
	skip
#endif
}

#ifdef M_NO_SEEN
#define BEHIND false
#else
#define BEHIND (new <= floor)
#endif

/* no_other_told: nobody else has been told an end that is still ahead. */
inline no_other_told()
{
	for (i : 0 .. HOLDERS - 1) { CHECK(two_live, i == me || i % NAMES != n || !told[i]) }
	i = 0
}

inline tell()
{
	if :: db.expires[n] > now -> told[me] = db.expires[n] :: else -> told[me] = 0 fi
}

/* grant is the COMMIT of fence.acquire. */
inline grant()
{
	d_step {
		CHECK(fence_shared, !(issued & BIT(new / 2)));
		CHECK(lease_falls, new > db.fence[n]);
		CHECK(short_grant, clock >= locked);
		no_other_told();
		REACHED(takeover, db.token[n] && !db.released[n] && db.owner[n] != me);
#ifdef FAIL
		REACHED(promoted_grant, promotions && issued);
		if :: to -> new_server = false :: else fi;
		after = after | BIT(drawn);
		if :: crashes < CRASHES -> durable_seq = db.seq :: else fi;
#endif
		issued = issued | BIT(new / 2);
		db.fence[n] = new; db.token[n] = drawn; db.owner[n] = me; db.expires[n] = clock + TTL; db.released[n] = false;
		if :: db.seen < new -> db.seen = new :: else fi;
		db.terms = db.terms | BIT(drawn);
		tell()
	}
	if
	:: new_grant()
	:: skip /* the answer is lost, and the grant is nobody's until it expires */
	fi
}

#ifdef M_RELEASE_BY_NAME
#define RELEASES true
#else
#define RELEASES (db.token[n] == token)
#endif

/* release is the COMMIT of fence.release. */
inline release()
{
	d_step {
		REACHED(late_release, db.token[n] != token && HELD(now));
		if :: db.token[n] == token -> told[me] = 0 :: else fi;
		if :: RELEASES -> db.released[n] = true; db.expires[n] = 0 :: else fi
	}
}

#ifdef M_RENEW_BY_NAME
#define RENEWS true
#else
#define RENEWS (db.token[n] == token)
#endif

/* renew is the COMMIT of fence.renew. */
inline renew()
{
	d_step {
		CHECK(expired_passes, !EXPIRED(locked));
		no_other_told();
		REACHED(renewed, db.expires[n] < clock + TTL);
		db.expires[n] = clock + TTL;
		tell()
	}
}

/* update_row locks the data row, and compares its newest version. */
inline update_row()
{
	if
	:: db.there[n] && TAKEN(db.row[n]) -> row_lock[n] = me + 1; kind = WRITE
	:: else ->
		if :: db.there[n] -> refused_by(db.row[n]) :: else fi;
		end_transaction();
		goto rest
	fi
}

/* commit is the COMMIT of whatever else there is. */
inline commit()
{
	if
	:: pinned ->
		CHECK(newer_grant, db.fence[n] == fence && db.token[n] == token);
		CHECK(expired_passes, ends > locked);
		REACHED(live_applied, now >= ends)
	:: else
	fi;
	if :: kind -> apply() :: else fi
}

/* ---- A holder, and what it does for ever, in any order. */

proctype Holder(byte me; byte n)
{
	byte fence, token;          /* of the grant that it thinks it has */
	bool gave_up;               /* it has asked to release that */
	bool mine, applied, sealed; /* it has written the row; under rule once; has read it after its seal */
	/* Of a transaction: the clock as read, the lease's end as read, when the lease row was locked, the fence drawn, the
	   highest fence before it or the tombstone's as read, the kind and rule of the write, whether the lease row is held FOR KEY SHARE. */
	byte clock, ends, locked, new, drawn, floor, kind;
	bool once, pinned;
	byte i;
#ifdef FAIL
	byte to;
#endif
#ifdef M_CACHE
	byte cached;
#endif

rest:
end:
	if
	/* -- fence.acquire */
#ifdef ROWS
	:: atomic {
		draws < DRAWS -> nextval();
		db.fence[n] = new; db.token[n] = drawn; new_grant(); new = 0; drawn = 0;
		goto rest
	   }
#else
#if defined(M_CLOCK_EARLY) || defined(M_DRAW_EARLY)
	:: atomic {
		draws < DRAWS -> BEGIN; clock = now;
#ifdef M_DRAW_EARLY
		nextval()
#endif
	   }
	   if
	   :: atomic { ALIVE && FREE_FOR_UPDATE -> for_update[n] = me + 1; locked = now; goto acquiring }
	   BROKEN
	   fi
#else
	:: atomic {
		draws < DRAWS && FREE_FOR_UPDATE -> BEGIN; for_update[n] = me + 1; locked = now; goto acquiring
	   }
#endif

	/* -- fence.release: gave_up stops nothing here, for it may have been sent before a late write is */
	:: atomic {
		fence && !gave_up && FREE_FOR_NO_KEY_UPDATE ->
		gave_up = true;
#ifdef FAIL /* a statement that is a transaction of its own: it fails as a whole, as if it had not been sent */
		release(); goto rest
#else
		no_key_update[n] = me + 1; goto releasing
#endif
	   }
#endif

#ifdef LIVE
	/* -- fence.renew: passes by a row that is locked */
	:: atomic {
		fence && !gave_up && FREE_FOR_NO_KEY_UPDATE ->
		if
		:: RENEWS -> no_key_update[n] = me + 1; locked = now; goto renewing
		:: else -> REACHED(renewal_refused, HELD(now)); goto rest
		fi
	   }

	/* -- fence.live, fence.pin */
#if defined(M_CLOCK_EARLY)
	:: atomic { fence -> clock = now }
	   atomic { FREE_FOR_KEY_SHARE ->
#else
	:: atomic { fence && FREE_FOR_KEY_SHARE ->
#endif
		if
		:: MINE && !db.released[n] ->
#ifndef M_LIVE_NO_LOCK
			key_share[n] = key_share[n] | BIT(me);
#endif
			ends = db.expires[n]; locked = now; pinned = true; goto checking
		:: else -> REACHED(live_refused, db.fence[n] > fence); end_transaction(); goto rest
		fi
	   }
#else
	/* -- Update and Seal, strength Fenced. The row is locked, and its newest version compared. */
	:: atomic {
		fence && !row_lock[n] -> choose_rule(); update_row();
#ifdef FAIL
		commit(); end_transaction(); goto rest
#else
		goto committing
#endif
	   }
#endif
#ifdef ROWS
	:: atomic {
		fence && !row_lock[n] && db.there[n] ->
		if
		:: LESS(db.row[n], fence - 1) -> row_lock[n] = me + 1; kind = SEAL; goto committing
		:: else ->
			if /* sealed or written by this grant already: it is read all the same */
			:: db.row[n] <= fence -> sealed = true; changed = changed & ~BIT(me)
			:: else -> refused_by(db.row[n])
			fi;
			goto rest
		fi
	   }
	/* -- Delete: the row first, then its key's floor */
	:: atomic {
		fence && !row_lock[n] -> choose_rule();
		if
		:: db.there[n] && TAKEN(db.row[n]) -> row_lock[n] = me + 1; kind = DELETE
		:: else ->
			if :: db.there[n] -> refused_by(db.row[n]) :: else fi;
			end_transaction(); goto rest
		fi
	   }
	   atomic { !floor_lock[n] -> floor_lock[n] = me + 1; goto committing }
	/* -- Insert: above the tombstone, which is read under the floor's lock */
#ifdef M_FLOOR_EARLY
	:: atomic { fence -> choose_rule(); floor = db.tomb[n] }
	   atomic { !floor_lock[n] ->
#else
	:: atomic { fence && !floor_lock[n] -> choose_rule(); floor = db.tomb[n];
#endif
		if
		:: !TAKEN(floor) ->
			if :: !db.there[n] -> refused_by(floor); REACHED(insert_refused, floor > fence) :: else fi;
			end_transaction(); goto rest
		:: else ->
			if
			:: db.there[n] -> end_transaction(); goto rest
			:: else -> floor_lock[n] = me + 1; kind = INSERT; goto committing
			fi
		fi
	   }
#endif
	fi;

#ifdef TIMED
acquiring: /* the clock, the source, the fence; all under the row's lock */
	if
	:: atomic { ALIVE && HELD(now) -> end_transaction(); goto rest }
	:: atomic {
		ALIVE && !HELD(now) && SOURCE_IS_FREE ->
#ifndef M_CLOCK_EARLY
		clock = now;
#endif
		check_source()
	   }
	BROKEN
	fi;
#ifdef FAIL
	if
	:: atomic { ALIVE && to -> REACHED(second_jump, promotions == 2); db.seq = to }
	:: !to
	BROKEN
	fi;
#endif
	if
	:: atomic {
		ALIVE -> floor = db.seen; /* read before the fence is drawn */
#ifndef M_DRAW_EARLY
		if
		:: draws < DRAWS -> nextval()
		:: else -> end_transaction(); goto rest
		fi;
#endif
		if
		:: BEHIND -> end_transaction(); goto rest /* WG001 */
		:: else
		fi
	   }
	BROKEN
	fi;
	if
	:: atomic { ALIVE -> grant(); end_transaction(); goto rest }
#ifndef FAIL
	:: atomic { end_transaction(); goto rest } /* it was rolled back */
#endif
	BROKEN
	fi;

#endif

#ifdef LIVE
releasing:
	if
	:: atomic { release(); end_transaction(); goto rest }
	:: atomic { end_transaction(); goto rest }
	fi;

renewing:
	if
	:: atomic { HELD(now) -> clock = now }
	:: atomic { !HELD(now) -> end_transaction(); goto rest }
	fi;
	if
	:: atomic { renew(); end_transaction(); goto rest }
	:: atomic { end_transaction(); goto rest }
	fi;

checking: /* the clock, after the lease row is locked */
	atomic {
#ifndef M_CLOCK_EARLY
		clock = now;
#endif
		if
		:: ends > clock
		:: else -> end_transaction(); goto rest
		fi
	}
	if
	:: atomic { !row_lock[n] -> choose_rule(); update_row(); goto committing }
	:: skip /* InTx: statements that are not the gate's, protected by nothing but the lease */
	fi;
#endif

#ifndef FAIL
committing:
	if
	:: atomic { commit(); end_transaction(); goto rest }
	:: atomic { end_transaction(); goto rest } /* it was rolled back, or the connection broke first */
	fi
#endif
}

#ifdef TIMED
active proctype Clock()
{
	byte i;
end:
	do
	:: d_step {
		now < TIME -> now++;
		for (i : 0 .. HOLDERS - 1) { if :: told[i] <= now -> told[i] = 0 :: else fi }
		i = 0
	   }
	od
}
#endif

#ifdef FAIL
inline copy(x, y)
{
	for (i : 0 .. NAMES - 1) {
		x.fence[i] = y.fence[i]; x.token[i] = y.token[i]; x.owner[i] = y.owner[i]; x.expires[i] = y.expires[i];
		x.released[i] = y.released[i]; x.row[i] = y.row[i]; x.there[i] = y.there[i]; x.tomb[i] = y.tomb[i];
		x.high[i] = y.high[i]; x.by[i] = y.by[i]
	}
	i = 0;
	x.seen = y.seen; x.terms = y.terms; x.seq = y.seq
}

inline all_transactions_end()
{
	for (i : 0 .. NAMES - 1) { for_update[i] = 0; no_key_update[i] = 0; key_share[i] = 0; row_lock[i] = 0 }
	for (i : 0 .. HOLDERS - 1) { in_tx[i] = false }
	i = 0;
	epoch_lock = 0
}

#ifdef M_ASYNC /* commits are answered before they are on disk: what is there may be as old as a standby's */
#define ASYNC (crashes < CRASHES)
inline recover() { copy(db, standby); durable_seq = db.seq }
#else
#define ASYNC false
inline recover() { skip }
#endif

active proctype Server()
{
	byte i;
	bool caught_up;
end:
	do
	/* The standby catches up, to any moment: what was drawn before a commit may arrive, or the commit with it. Of several
	   times only the last would matter; where it has not since the last promotion, another of the same age is next. */
	:: d_step { !caught_up && (promotions < PROMOTIONS || ASYNC) -> copy(standby, db); caught_up = true }
	/* It is promoted, and the primary is gone with what had not arrived. Without lag this is a restart, too. */
	:: d_step {
		promotions < PROMOTIONS -> promotions++;
		copy(db, standby); caught_up = false;
		if :: promotions == PROMOTIONS -> copy(standby, nothing) :: else fi;
		durable_seq = db.seq; new_server = true; after = 0;
		for (i : 0 .. HOLDERS - 1) { told[i] = 0 }
		for (i : 0 .. NAMES - 1) {
			if
			:: db.token[i] && !db.released[i] && db.expires[i] > now -> told[db.owner[i]] = db.expires[i]
			:: else
			fi
		}
		all_transactions_end()
	   }
	/* A backend is killed, and recovery goes through the log; the server counts as the same. */
	:: d_step { crashes < CRASHES -> crashes++; recover(); all_transactions_end() }
	/* What was drawn by a transaction that had not committed may be forgotten. */
	:: d_step { crashes < CRASHES -> crashes++; recover(); db.seq = durable_seq; durable_seq = 0; all_transactions_end() }
	od
}
#endif

init
{
	byte i;
	atomic {
		for (i : 0 .. NAMES - 1) {
			db.there[i] = true
#ifdef FAIL
			; standby.there[i] = true
#endif
		}
		for (i : 0 .. HOLDERS - 1) { run Holder(i, i % NAMES) }
		i = 0
	}
}
