-- A folder belongs to one run, and ranks agree on everything or say so: each case is started as a user would start it, and must
-- leave what was there before.
local dt = require "dtrain"
local support = require "support"

local head = 'local dt = require "dtrain"\nlocal nn, optim, data = dt.nn, dt.optim, dt.data\n'
-- A job whose keys can be replaced; it saves below "ck".
local function script(keys)
  local k = { model = "nn.Sequential { nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 5) }", batch = "32", seed = "0",
    precision = '"f32"', optimizer = "optim.Adam { lr = 0.01 }", samples = "100", steps = "4", more = "",
    checkpoint = '{ dir = "ck", every = 2 }',
    parallel = "{}", before = "" }
  for name, v in dt.sorted(keys or {}) do k[name] = v end
  k.data = k.data or ("data.synthetic { inputs = { 10 }, targets = { 5 }, samples = %s }"):format(k.samples)
  return head .. k.before .. ([[
return dt.job { model = %s, loss = nn.MSE(), batch = %s, seed = %s, precision = %s, optimizer = %s, steps = %s, checkpoint = %s,
  data = %s, parallel = %s, %s }]]):format(k.model, k.batch, k.seed, k.precision, k.optimizer, k.steps, k.checkpoint, k.data,
    k.parallel, k.more)
end

local function put(dir, keys) support.write(dir .. "/a.lua", script(keys)) end
local function run(dir, words, options)
  options = options or {}
  options.dir = dir
  return support.run("a.lua --quiet " .. (words or ""), options)
end
local function fresh(keys, words, options)
  local dir = support.folder()
  put(dir, keys)
  local code, text = run(dir, words, options)
  assert(code == 0, text)
  return dir
end
local function sh(dir, line)
  local code, text = support.sh("sh -c " .. support.quote(line), { dir = dir })
  assert(code == 0, text)
  return text
end
local function fails(dir, words, ...)
  local code, text = run(dir, words)
  assert.are_not.equal(0, code)
  for _, part in ipairs { ... } do assert.is_truthy(text:find(part, 1, true), text) end
  return text
end

describe("a folder that holds another run's checkpoints", function()
  it("is refused with the three ways on, and stays as it is", function()
    local dir = fresh()
    local before = support.list(dir .. "/ck")
    fails(dir, "", "a.lua:3: ", "ck holds checkpoints of run ", "(step 2, 4)", "--resume auto", "another folder", "--overwrite")
    assert.are.equal(before, support.list(dir .. "/ck"))
  end)
  it("is refused by its metrics alone, which stay", function()
    local dir = fresh { checkpoint = "nil" }
    sh(dir, "mkdir out && echo '{\"step\":1}' > out/metrics.jsonl")
    fails(dir, "--out out", "out/metrics.jsonl holds the metrics", "--overwrite")
    assert.are.equal('{"step":1}\n', support.read(dir .. "/out/metrics.jsonl"))
  end)
  it("is emptied of them by --overwrite, and of nothing else", function()
    local dir = fresh()
    sh(dir, "echo mine > ck/notes.txt")
    local code, text = run(dir, "--overwrite --steps 1")
    assert.are.equal(0, code, text)
    assert.are.equal("./notes.txt\n./run.json\n./step-00000001/manifest.json\n./step-00000001/model.safetensors\n"
      .. "./step-00000001/optim.safetensors\n", support.list(dir .. "/ck"))
  end)
  it("is kept aside by --overwrite until the new run has a checkpoint", function()
    local dir = fresh({ checkpoint = "nil" }, "--out out")
    local old = support.read(dir .. "/out/metrics.jsonl")
    local checkpoints = support.list(dir .. "/out/checkpoints"):gsub("./run.json\n", "")
    put(dir, { checkpoint = '{ dir = "out/checkpoints", every = 10000000 }', steps = "100000000" })
    sh(dir, ([[%s a.lua --quiet --out out --overwrite & pid=$!
      for i in $(seq 100); do [ -s out/metrics.jsonl ] && grep -q '"step":5' out/metrics.jsonl && break; sleep 0.05; done
      kill -9 $pid; wait $pid; true]]):format(support.dtrain))
    assert.are.equal(checkpoints, support.list(dir .. "/out/checkpoints/replaced"))
    assert.are.equal(old, support.read(dir .. "/out/replaced/metrics.jsonl"))
    assert.are.equal(0, (support.sh(("mv out/checkpoints/replaced/step-00000004 old && %s a.lua --quiet --resume old "
      .. "--resume-with script --steps 5 --out new"):format(support.dtrain), { dir = dir }))) -- it is whole
    assert.are.equal(0, (run(dir, "--out out --overwrite --steps 3")))
    assert.is_nil(support.list(dir .. "/out"):find "replaced")
    assert.are.same({ 1, 2, 3 }, support.metric(dir .. "/out/metrics.jsonl", "step"))
  end)
  it("goes on from --resume auto, from the folder's own name, and with --out from the run's", function()
    local dir = fresh()
    assert.are.equal(0, (run(dir, "--resume auto --steps 5")))
    assert.are.equal(0, (run(dir, "--resume ck --steps 6")))
    dir = fresh({ checkpoint = "nil" }, "--out out")
    local code, text = run(dir, "--out out --resume out --steps 6")
    assert.are.equal(0, code, text)
    assert.are.same({ 1, 2, 3, 4, 5, 6 }, support.metric(dir .. "/out/metrics.jsonl", "step"))
    assert.is_truthy(support.read(dir .. "/out/checkpoints/step-00000006/manifest.json"))
  end)
  it("keeps later checkpoints when an earlier one is named", function()
    local dir = fresh()
    fails(dir, "--resume ck/step-00000002", "later checkpoints (step 4)", "--overwrite")
    assert.are.equal(0, (run(dir, "--resume ck/step-00000002 --overwrite --steps 3")))
    assert.is_nil(support.list(dir .. "/ck"):find "step%-00000004")
  end)
  it("is not the place for a run that goes on from elsewhere", function()
    local a, b = fresh(), fresh()
    fails(a, "--resume " .. b .. "/ck", "goes on from elsewhere")
  end)
end)

describe("two jobs in one folder", function()
  it("are one: the second is told whose it is, the first goes on", function()
    local dir = support.folder()
    put(dir, { steps = "1000000", more = 'out = "out"' })
    local text = sh(dir, ([[%s a.lua --quiet & pid=$!; for i in $(seq 100); do [ -s ck/run.json ] && break; sleep 0.05; done
      %s a.lua --quiet 2>&1 --resume auto; echo code $?; kill -0 $pid && echo alive
      kill -TERM $pid; wait $pid; echo first $?]]):format(
      support.dtrain, support.dtrain))
    assert.is_truthy(text:find("ck: belongs to a run that is under way: process", 1, true), text)
    assert.matches("code 1\nalive\nfirst 75", text)
  end)
  it("is free once its job is dead", function()
    local dir = support.folder()
    put(dir, { steps = "1000000" })
    sh(dir, ([[%s a.lua --quiet & pid=$!; for i in $(seq 100); do [ -e ck/step-00000002 ] && break; sleep 0.05; done
      kill -9 $pid; wait $pid; true]]):format(support.dtrain))
    local code, text = run(dir, "--resume auto --steps 1")
    assert.are.equal(0, code, text)
  end)
end)

describe("a folder on a file system without locks", function()
  -- Takes flock away, gives this process the name of a host, and shortens its naps.
  local shim = [[
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
int flock(int fd, int how) { (void)fd, (void)how; errno = ENOLCK; return -1; }
int gethostname(char *name, size_t n) { strncpy(name, getenv("SHIM_HOST"), n); return 0; }
int nanosleep(const struct timespec *t, struct timespec *left) {
  int (*real)(const struct timespec *, struct timespec *);
  *(void **)&real = dlsym(RTLD_NEXT, "nanosleep");
  struct timespec s = *t;
  if (getenv("SHIM_FAST") && s.tv_sec) s = (struct timespec){0, s.tv_sec * 20000000};
  return real(&s, left);
}]]
  -- A folder with the shim and a script of many steps; on(host, more) is the start of a command there.
  local function made()
    local dir = support.folder()
    support.write(dir .. "/shim.c", shim)
    sh(dir, "${CC:-cc} -shared -fPIC -o shim.so shim.c -ldl 2>&1")
    put(dir, { steps = "100000000" })
    return dir, function(host, more)
      return ("env LD_PRELOAD=%s/shim.so ASAN_OPTIONS=verify_asan_link_order=0 SHIM_HOST=%s %s %s a.lua --quiet"):format(dir, host,
        more or "", support.quote(support.dtrain))
    end
  end
  local saved = "for i in $(seq 200); do [ -e ck/step-00000002 ] && break; sleep 0.05; done; "
  it("is refused while its run lives, on its own host and on another", function()
    local dir, on = made()
    local text = sh(dir, on "one" .. " & pid=$!; " .. saved .. on "one" .. " --resume auto 2>&1; echo code $?; " .. on "two"
      .. " --resume auto 2>&1; echo code $?; kill -0 $pid && echo alive; kill -TERM $pid; wait $pid; echo first $?")
    local refused = "ck: belongs to a run that is under way: process %d+ on one, started [^\n]*"
      .. "%(if it is dead, remove run.json from the folder%)\ncode 1\n"
    assert.matches(refused .. ".*for 60 s this looks whether process %d+ on one.-" .. refused .. "alive\nfirst 75", text)
    assert.is_truthy(support.read(dir .. "/ck/run.json"):find('"process": 0', 1, true)) -- let go
  end)
  it("is free once its run is dead, at once on its own host and after a while on another", function()
    local dir, on = made()
    for _, host in ipairs { "one", "two" } do
      local text = sh(dir, on "one" .. " --overwrite & pid=$!; sleep 1; " .. saved .. "kill -9 $pid; wait $pid; "
        .. on(host, host == "two" and "SHIM_FAST=1" or "") .. " --resume auto --steps 1 2>&1; echo code $?")
      assert.matches("code 0\n$", text)
      assert.are.equal(host == "two", text:find("for 60 s this looks", 1, true) ~= nil, text)
    end
  end)
  it("is one's of two that come at once", function()
    local dir, on = made()
    local text = sh(dir, on "one" .. " > 1 2>&1 & a=$!; " .. on "two" .. " > 2 2>&1 & b=$!; " .. saved .. [[sleep 8
      kill -TERM $a $b 2> /dev/null; wait $a; x=$?; wait $b; echo $x $?; cat 1 2]])
    assert.is_truthy(text:find "1 75\n" or text:find "75 1\n", text)
    assert.matches("belongs to a run that is under way", text)
  end)
end)

describe("what lies in the folder and is not ours", function()
  it("is not followed: links to folders outside stay full", function()
    local dir = support.folder()
    put(dir)
    sh(dir, [[mkdir -p ck outside && echo precious > outside/file && ln -s ../outside ck/step-a.tmp
      ln -s ../outside ck/step-00000002.tmp]])
    local code, text = run(dir)
    assert.are_not.equal(0, code) -- the temporary name of a checkpoint is taken
    assert.is_truthy(text:find "step%-00000002.tmp", text)
    assert.are.equal("precious\n", support.read(dir .. "/outside/file"))
    sh(dir, "rm ck/step-00000002.tmp; ln -s ../outside ck/step-00000005")
    fails(dir, "--overwrite", "ck/step-00000005 is no folder of a checkpoint")
    assert.are.equal("precious\n", support.read(dir .. "/outside/file"))
  end)
  it("a folder of the user's in an old checkpoint stays, and the run goes on", function()
    local dir = fresh { checkpoint = '{ dir = "ck", every = 1, keep = 1 }', steps = "2" }
    sh(dir, "mkdir ck/step-00000002/mine && echo x > ck/step-00000002/mine/file")
    local code, text = run(dir, "--resume auto --steps 4")
    assert.are.equal(0, code, text)
    assert.matches("step%-00000002: stays though it is old: it holds more than a checkpoint", text)
    assert.are.equal("x\n", support.read(dir .. "/ck/step-00000002/mine/file"))
    assert.is_nil(support.list(dir .. "/ck"):find "step%-00000003")
  end)
  for _, name in ipairs { "manifest.json", "model.safetensors" } do
    it("a pipe in the place of " .. name .. " is refused, not waited for", function()
      local dir = fresh()
      sh(dir, ("rm ck/step-00000004/%s && mkfifo ck/step-00000004/%s"):format(name, name))
      fails(dir, "--resume ck/step-00000004", name, "no plain file")
    end)
  end
  it("a link in the place of metrics.jsonl is refused", function()
    local dir = fresh { checkpoint = "nil" }
    sh(dir, "mkdir out && echo precious > file && ln -s ../file out/metrics.jsonl")
    fails(dir, "--out out", "out/metrics.jsonl: is a symbolic link")
    sh(dir, "rm out/metrics.jsonl && ln file out/metrics.jsonl")
    fails(dir, "--out out --overwrite", "one of several names of a file")
    assert.are.equal("precious\n", support.read(dir .. "/file"))
  end)
end)

describe("a resume", function()
  for _, c in ipairs { { "seed", "--seed 7", "seed = 0", "seed = 7" }, { "batch", { batch = "16" }, "batch = 32", "batch = 16" },
    { "data", { samples = "90" }, "100 samples", "90 samples" },
    { "optimizer", { optimizer = "optim.Adam { lr = 0.01, betas = { 0.8, 0.99 } }" }, "0.9", "0.8" },
    { "schedule", { more = "schedule = optim.step { step_size = 1 }" }, "constant", "step" },
    { "clip", { more = "clip = 1.0" }, "clip = { }", "norm = 1" } } do
    it("with another " .. c[1] .. " names both, and goes on when that is said", function()
      local dir = fresh()
      local words = type(c[2]) == "string" and c[2] or ""
      if words == "" then put(dir, c[2]) end
      local more = words == "" and ",script" or ""
      local text = fails(dir, "--resume auto --steps 6 --resume-with " .. (more == "" and "dtrain" or "script") .. " " .. words,
        "--resume-with " .. c[1], "was written with " .. c[1])
      assert.is_truthy(text:gsub("  +", " "):find(c[3], 1, true) and text:find(c[4], 1, true), text)
      local code
      code, text = run(dir, ("--resume auto --steps 6 --resume-with %s%s %s"):format(c[1], more, words))
      assert.are.equal(0, code, text)
    end)
  end
  it("with another script says so", function()
    local dir = fresh()
    put(dir, { more = "-- a remark" .. "\n" })
    fails(dir, "--resume auto", "was written with script = ", "--resume-with script")
  end)
  for _, way in ipairs { 'require "parts"', 'dofile "parts.lua"', 'assert(loadfile "parts.lua")()' } do
    it(("with another file that %s loads says which"):format(way:match "%l+%f[%W]" == "assert" and "loadfile" or way:match "%l+"),
      function()
        local dir = support.folder()
        put(dir, { before = "local lr = " .. way .. "\n", optimizer = "optim.SGD { lr = 0.1 }" })
        support.write(dir .. "/parts.lua", "return 0.1")
        assert.are.equal(0, (run(dir)))
        support.write(dir .. "/parts.lua", "return 0.2")
        fails(dir, "--resume auto", "was written with script = ", "with parts.lua ", "--resume-with script")
        local code, text = run(dir, "--resume auto --resume-with script --steps 5")
        assert.are.equal(0, code, text)
      end)
  end
  it("with another function for the samples says so, and knows one that has moved", function()
    local function own(factor, before)
      return { before = before,
        data = ("data.from(function(i) return dt.full({ 10 }, i / %d), dt.ones { 5 } end, 100)"):format(factor) }
    end
    local dir = fresh(own(100))
    put(dir, own(100, "-- a remark\n"))
    fails(dir, "--resume auto", "was written with script = ")
    assert.are.equal(0, (run(dir, "--resume auto --resume-with script --steps 5")))
    put(dir, own(200))
    fails(dir, "--resume auto --resume-with script", "by a function of a.lua, lines ", "--resume-with data")
  end)
  it("with another order of the samples, or one that differs in the middle, says so", function()
    local function own(order, value)
      return { before = "local order, rows = {}, {}\nfor i = 0, 99 do order[i + 1], rows[i + 1] = " .. order
        .. ", dt.full({ 10 }, i == 50 and " .. value .. " or 1):totable() end\n",
        data = "data.tensors { inputs = dt.tensor(rows), targets = dt.ones { 100, 5 }, order = order }" }
    end
    local dir = fresh(own("i", "1"))
    for _, other in ipairs { own("99 - i", "1"), own("i", "2") } do
      put(dir, other)
      fails(dir, "--resume auto --resume-with script", "was written with data = ", "in order ", "--resume-with data")
    end
  end)
  it("with another option of the script's says so, and goes on", function()
    local dir = fresh { before = "local args = dt.args { p = 0.5 }\n",
      model = "nn.Sequential { nn.Linear(10, 5), nn.Dropout(args.p) }" }
    local code, text = support.run("a.lua --resume auto --steps 5 --p 0.25", { dir = dir })
    assert.are.equal(0, code, text)
    assert.matches("note: option p changes from 0.5 to 0.25\n", text)
  end)
  it("from f32 in f16 starts with the job's loss scale", function()
    local dir = fresh()
    put(dir, { precision = '{ dtype = "f16", loss_scale = 1024 }',
      more = "after = function(e) print('scale', e.info.loss_scale) end" })
    local code, text = run(dir, "--resume auto --steps 5 --resume-with precision,script")
    assert.are.equal(0, code, text)
    assert.matches("scale%s+1024", text)
  end)
  it("sees that somebody has edited the manifest", function()
    local dir = fresh()
    for _, edit in ipairs { 's/"step": 4/"step": 400/', 's/"schedule": 4/"schedule": 5/', 's/"batch": "32"/"batch": "64"/' } do
      sh(dir, ("cp -r ck/step-00000004 keep; sed -i '%s' ck/step-00000004/manifest.json"):format(edit))
      fails(dir, "--resume ck/step-00000004", "manifest.json: has changed since it was written")
      sh(dir, "rm -r ck/step-00000004; mv keep ck/step-00000004")
    end
    assert.are.equal(0, (run(dir, "--resume ck/step-00000004 --steps 5")))
  end)
  it("refuses names that --resume-with doesn't know", function()
    fails(fresh(), "--resume auto --resume-with bach", "did you mean 'batch'")
  end)
end)

describe("metrics.jsonl", function()
  it("is cut back to the checkpoint: torn lines and steps beyond it go", function()
    local dir = fresh({ checkpoint = "nil" }, "--out out")
    local whole = support.read(dir .. "/out/metrics.jsonl")
    support.write(dir .. "/out/metrics.jsonl", whole .. '{"step":5,"loss":1}\n{"step":6,"lo')
    assert.are.equal(0, (run(dir, "--out out --resume auto --steps 7")))
    assert.are.same({ 1, 2, 3, 4, 5, 6, 7 }, support.metric(dir .. "/out/metrics.jsonl", "step"))
    assert.are.equal(whole, support.read(dir .. "/out/metrics.jsonl"):sub(1, #whole))
  end)
  it("says that the disk is full, and has whole lines only", function()
    local dir = support.folder()
    put(dir, { checkpoint = "nil", steps = "60", more = 'log_every = 1, eval = { every = 1 }, after = function() end' })
    support.write(dir .. "/a.lua", (script { steps = "60", checkpoint = "nil" }):gsub("steps = 60", "steps = 60, out = 'out'"))
    local text = sh(dir, ("trap '' XFSZ; ulimit -f 4; %s a.lua --quiet 2>&1; echo code $?"):format(support.dtrain))
    assert.matches("out/", text)
    assert.matches("cannot write", text)
    for line in support.read(dir .. "/out/metrics.jsonl"):gmatch "[^\n]*\n?" do
      assert.is_truthy(line == "" or line:find "^{.*}\n$", line)
    end
  end)
end)

describe("what a run will write is tried before step 1:", function()
  local function early(keys, words, ...)
    local dir = support.folder()
    keys.model = keys.model or "nn.Linear(10, 5)"
    put(dir, keys)
    sh(dir, "echo > file")
    local code, text = support.run("a.lua --verbose " .. (words or ""), { dir = dir })
    assert.are_not.equal(0, code)
    for _, part in ipairs { ... } do assert.is_truthy(text:find(part, 1, true), text) end
    assert.is_nil(text:find "step 1", text)
  end
  it("a folder that cannot be", function() early({ checkpoint = '{ dir = "file/ck" }' }, "", "file") end)
  it("keep", function() early({ checkpoint = '{ dir = "ck", keep = -1 }' }, "", "keep is how many checkpoints stay") end)
  it("an evaluation set of another shape", function()
    early({ more = "eval = { data = data.synthetic { inputs = { 11 }, targets = { 5 }, samples = 8 } }" }, "",
      "the evaluation set's samples have 'inputs' f32 {11}")
  end)
end)

describe("ranks", function()
  local ranked = 'local first = dt.rank() == 0\n'
  local function differ(keys, hosts, ...)
    local dir = support.folder()
    keys.before = ranked
    keys.checkpoint = "nil"
    put(dir, keys)
    local code, text = run(dir, "", { ranks = 2, seconds = 20, env = hosts and "DT_COMM_HOSTS=2" })
    assert.are_not.equal(0, code)
    assert.are_not.equal(124, code, text)
    for _, part in ipairs { "a.lua:4: the ranks' runs differ", 'rank 0 has "', 'rank 1 has "', ... } do
      assert.is_truthy(text:find(part, 1, true), text)
    end
  end
  local tensor = '{ tensor = 2 }'
  for _, c in ipairs {
    { "learning rate", { optimizer = "optim.Adam { lr = first and 0.1 or 0.2 }" }, "lr = 0.1" },
    { "schedule", { more = "schedule = optim.step { step_size = first and 1 or 2 }" }, "schedule = step" },
    { "seed", { seed = "first and 1 or 2" }, "seed = 1" },
    { "steps", { steps = "first and 4 or 5" }, "steps = 4" },
    { "data length", { samples = "first and 100 or 101" }, "101 samples" },
    { "data function", { data = "data.from(first and function() return dt.ones { 10 }, dt.ones { 5 } end\n"
      .. "  or function() return dt.zeros { 10 }, dt.ones { 5 } end, 100)" }, "by a function of a.lua" },
    { "loss scale", { precision = "{ dtype = 'f16', loss_scale = first and 8 or 16 }" }, "loss_scale = 8" },
    { "weight decay of tensor ranks", { optimizer = "optim.AdamW { lr = 0.1, weight_decay = first and 0 or 0.1 }",
      parallel = tensor }, "weight_decay = 0" },
    { "beta of tensor ranks", { optimizer = "optim.AdamW { lr = 0.1, betas = { first and 0.9 or 0.8, 0.99 } }",
      parallel = tensor }, "0.8" },
    { "clip of pipeline ranks", { more = "clip = first and 1.0 or 2.0", parallel = "{ pipeline = 2 }" }, "norm = 1" },
  } do
    for _, hosts in ipairs { false, true } do
      if not hosts or c[1] == "seed" or c[1]:find "^weight" then
        it(("that differ in %s%s say so"):format(c[1], hosts and " on two hosts" or ""), function() differ(c[2], hosts, c[3]) end)
      end
    end
  end
  it("of other files beside the script say so", function()
    local dir = support.folder()
    put(dir, { checkpoint = "nil", before = "local lr = require 'parts'\n" })
    support.write(dir .. "/parts.lua", "return 0.1")
    sh(dir, "mkdir other && cp a.lua other && echo 'return 0.2' > other/parts.lua")
    local _, text = support.sh(("sh -c %s"):format(support.quote(
      '[ "$OMPI_COMM_WORLD_RANK" = 1 ] && cd other; exec ' .. support.dtrain .. " a.lua --quiet")),
      { ranks = 2, dir = dir, seconds = 20 })
    assert.matches('rank 1 has "script = %x+, with parts.lua %x+"', text)
  end)
  it("of other instruction sets say so", function()
    local dir = support.folder()
    put(dir, { checkpoint = "nil" })
    local _, text = support.sh(("sh -c %s"):format(support.quote(
      'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then export DT_ISA=portable; fi; exec ' .. support.dtrain .. " a.lua --quiet")),
      { ranks = 2, dir = dir, seconds = 20 })
    assert.is_truthy(text:find('rank 1 has "instruction set = portable"', 1, true), text)
  end)
  for _, c in ipairs { { "ends early", "if dt.rank() == 1 then return end\ndt.barrier()", "the end of the program" },
    { "calls something else", "if dt.rank() == 1 then dt.barrier() else dt.all_reduce(dt.ones { 3 }) end",
      "rank 0 all_reduce sum of f32[3] (a.lua:3), rank 1 barrier" } } do
    it("on two hosts, of which one " .. c[1] .. ", get an error in time", function()
      local dir = support.folder()
      support.write(dir .. "/a.lua", head .. c[2] .. "\n")
      local code, text = run(dir, "", { ranks = 2, seconds = 15, env = "DT_COMM_HOSTS=2" })
      assert.are_not.equal(0, code)
      assert.are_not.equal(124, code, text)
      assert.is_truthy(text:find(c[3], 1, true) and text:find "must make the same calls in the same order", text)
    end)
  end
  it("of which two on one host disagree all learn of it, also those of the other host", function()
    local dir = support.folder()
    support.write(dir .. "/a.lua", (script { checkpoint = "nil" }):gsub("return dt.job", "local job = dt.job") .. [[

local e = dt.engine(job)
e:step()
local _, message = pcall(dt.rank() == 1 and dt.barrier or e.step, dt.rank() == 1 and nil or e)
io.stderr:write(("told %d: %s\n"):format(dt.rank(), message))
require "dtrain.core".sleep(2)
os.exit(3)]])
    local code, text, seconds = run(dir, "", { ranks = 4, seconds = 20, env = "DT_COMM_HOSTS=2" })
    assert.are_not.equal(0, code)
    for r = 0, 3 do
      assert.matches(("told %d: [^\n]*rank %%d is at [^\n]*, rank %%d at [^\n]*must make the same calls"):format(r), text)
    end
    assert.is_true(seconds < 10, text)
  end)
  local normed = "nn.Sequential { nn.Linear(10, 16), nn.LayerNorm(16), nn.Linear(16, 5) }"
  local twice = [[(function()
    local l = nn.Linear(10, 10)
    return nn.Sequential { l, nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), l, nn.Linear(10, 5) }
  end)()]] -- stages 0 and 1 share l
  local shifted = [[(function()
    local Shift = nn.module "Shift"
    function Shift:init() self.by = nn.buffer { 16 } end
    function Shift:forward(x) return x + self.by end
    return nn.Sequential { nn.Linear(10, 16), Shift(), nn.Linear(16, 5) }
  end)()]]
  -- strategy, ranks, model, the rank on which a bit flips, and of which tensor
  for _, c in ipairs { { "{}", 2, normed, 1, "1.bias", 16 }, { "{ tensor = 2 }", 2, normed, 1, "1.bias", 16 },
    { "{}", 2, normed, 1, "state:1.bias:v", 16 }, { "{ tensor = 2 }", 2, normed, 1, "state:1.bias:m", 16 },
    { "{}", 2, shifted, 1, "buffer:1.by", 16 }, { "{ tensor = 2, zero = 1 }", 4, normed, 3, "1.bias", 16 },
    { "{ pipeline = 2 }", 4, twice, 3, "5.bias", 5 }, { "{ pipeline = 2 }", 4, twice, 2, "state:5.bias:m", 5 },
    { "{ pipeline = 2 }", 2, twice, 1, "0.bias", 10 }, { "{ pipeline = 2 }", 2, twice, 1, "state:0.bias:m", 10 } } do
    it(("whose replicas of %s drift apart under %s are told so, %d ranks"):format(c[5], c[1], c[2]), function()
      local dir = support.folder()
      support.write(dir .. "/a.lua", (script { model = c[3], checkpoint = "nil", parallel = c[1], steps = "9",
        more = "compare_every = 3" }):gsub("return dt.job", "local job = dt.job") .. ([[

local e = dt.engine(job)
for step in e:batches() do
  e:step()
  if step == 2 and dt.rank() == %d then -- a bit that flips
    e.exec:set("%s", dt.full({ %d }, 0.5))
  end
  if step == 2 and %s then require "dtrain.engine".compare(e) end -- before parameters follow
  if step == 5 then print "too late" end
end]]):format(c[4], c[5], c[6], c[5]:find "state:" ~= nil))
      local code, text = run(dir, "", { ranks = c[2], seconds = 20 })
      assert.are_not.equal(0, code)
      local line = 'replicas of a tensor differ at line %d+: rank 0 has "([%w.:_]+) %x+", rank 1 has "([%w.:_]+) %x+"'
      local first, second = text:match(line)
      assert.are.equal(first, second, text)
      if c[5]:find ":" then assert.are.equal(c[5], first, text) end -- a parameter takes others along
      assert.is_nil(text:find "too late")
    end)
  end
end)

describe("a folder that one rank alone sees", function()
  it("takes a checkpoint of all ranks, and gives it back", function()
    local dir, want = support.folder(), fresh({ parallel = "{ zero = 1 }" }, "", { ranks = 2 })
    put(dir, { parallel = "{ zero = 1 }" })
    sh(dir, "mkdir r0 r1")
    local line = support.quote('cd r$OMPI_COMM_WORLD_RANK && exec ' .. support.dtrain .. " ../a.lua --quiet ")
    local code, text = support.sh("sh -c " .. line, { ranks = 2, dir = dir })
    assert.are.equal(0, code, text)
    assert.are.equal("", support.list(dir .. "/r1"))
    for _, file in ipairs { "model", "optim" } do
      local name = ("/ck/step-00000004/%s.safetensors"):format(file)
      assert.is_true(support.read(dir .. "/r0" .. name) == support.read(want .. name))
    end
    assert.are.equal(0, (run(want, "--resume auto --steps 7", { ranks = 2 })))
    code, text = support.sh("sh -c " .. line:gsub("quiet ", "quiet --resume auto --steps 7 "), { ranks = 2, dir = dir })
    assert.are.equal(0, code, text)
    for _, file in ipairs { "model", "optim" } do
      local name = ("/ck/step-00000007/%s.safetensors"):format(file)
      assert.is_true(support.read(dir .. "/r0" .. name) == support.read(want .. name))
    end
  end)
end)
