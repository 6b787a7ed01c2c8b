-- What campaigns left. `PRAGMA user_version` has the version of this schema.

CREATE TABLE run (
    id TEXT PRIMARY KEY,           -- random
    began TEXT NOT NULL,           -- UTC, as 2026-01-31T12:00:00.000000+00:00
    mode TEXT NOT NULL,            -- plain, explore, pr or nightly
    seed INTEGER,                  -- of its generated scenarios; NULL for a finding whose run was not entered
    shard TEXT NOT NULL,           -- as 2/8; empty for the whole
    torch TEXT NOT NULL,           -- version
    torch_commit TEXT NOT NULL,    -- that torch was built from
    equivcheck TEXT NOT NULL,      -- version
    revision TEXT NOT NULL,        -- commit of the repository in which it ran; empty where there is none
    platform TEXT NOT NULL,
    seconds REAL NOT NULL DEFAULT 0,
    checks INTEGER NOT NULL DEFAULT 0,
    pairs INTEGER NOT NULL DEFAULT 0,
    of_pairs INTEGER NOT NULL DEFAULT 0,
    ended TEXT NOT NULL DEFAULT '', -- finished, interrupted or broken; empty while it runs, and if it was killed
    fail_on TEXT NOT NULL DEFAULT 'all' -- which findings can make it fail: all, or trainings
);

CREATE TABLE outcome (
    run TEXT NOT NULL REFERENCES run (id),
    layout TEXT NOT NULL,
    outcome TEXT NOT NULL,
    checks INTEGER NOT NULL,
    PRIMARY KEY (run, layout, outcome)
);

CREATE TABLE cost (
    run TEXT NOT NULL REFERENCES run (id),
    layout TEXT NOT NULL,
    seconds REAL NOT NULL,         -- of all checks of the layout
    PRIMARY KEY (run, layout)
);

CREATE TABLE progress (
    run TEXT NOT NULL REFERENCES run (id),
    seconds REAL NOT NULL,         -- since the run's first check
    checks INTEGER NOT NULL,
    pairs INTEGER NOT NULL,
    findings INTEGER NOT NULL,
    PRIMARY KEY (run, seconds)
);

CREATE TABLE summary (
    run TEXT PRIMARY KEY REFERENCES run (id),
    json TEXT NOT NULL             -- what it left, as `fuzz --json` prints it; no row for a run that was killed
);

CREATE TABLE finding (
    fingerprint TEXT PRIMARY KEY,
    name TEXT NOT NULL,            -- of the scenario
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL
);

CREATE TABLE sighting (
    run TEXT NOT NULL REFERENCES run (id),
    fingerprint TEXT NOT NULL REFERENCES finding (fingerprint),
    seen TEXT NOT NULL,            -- whether it shows, as `Recheck` says
    PRIMARY KEY (run, fingerprint)
);

CREATE TABLE acceptance (
    fingerprint TEXT PRIMARY KEY REFERENCES finding (fingerprint),
    reason TEXT NOT NULL,
    until TEXT NOT NULL            -- the last day on which it holds, as 2026-01-31
);
