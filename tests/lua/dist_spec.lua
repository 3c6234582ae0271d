-- Whole runs, alone and on ranks: the same command gives the same bits; a resumed run continues with the same bits; Ctrl-C and
-- SIGTERM save and stop; only rank 0 prints.
local dt = require "dtrain"
local support = require "support"

local script = "tests/dist/resume.lua"

-- Runs the script with its checkpoints in `dir`; asserts success and returns what it printed.
local function train(dir, words, ranks)
  local code, text = support.run(("%s --dir %s %s"):format(script, dir, words or ""), { ranks = ranks, seconds = 60 })
  assert(code == 0, text)
  return text
end

-- The bytes of a checkpoint's tensors.
local function bits(dir, step)
  local at = ("%s/step-%08d/"):format(dir, step)
  return assert(support.read(at .. "model.safetensors"), at) .. assert(support.read(at .. "optim.safetensors"), at)
end

local function steps(dir)
  local out = {}
  for name in support.list(dir):gmatch "step%-0*(%d+)/manifest%.json" do out[#out + 1] = tonumber(name) end
  return out
end

describe("the same command", function()
  for _, c in ipairs { { "alone", "", nil }, { "alone in bf16", "--precision bf16" }, { "alone in f16", "--precision f16" },
    { "on 2 ranks", "", 2 }, { "on 3 ranks", "", 3 } } do
    it(c[1] .. " gives the same bits", function()
      local a, b = support.folder(), support.folder()
      train(a, c[2], c[3])
      train(b, c[2], c[3])
      assert.is_true(bits(a, 12) == bits(b, 12))
    end)
  end
  it("with another seed gives others", function()
    local a, b = support.folder(), support.folder()
    train(a)
    train(b, "--seed 8")
    assert.is_false(bits(a, 12) == bits(b, 12))
  end)
  it("with 1 and with 2 threads gives the same losses to 1e-5", function()
    local losses = {}
    for threads = 1, 2 do
      local out = support.folder()
      train(support.folder(), ("--threads %d --out %s --steps 12"):format(threads, out))
      losses[threads] = support.metric(out .. "/metrics.jsonl", "loss")
    end
    assert.are.equal(12, #losses[1])
    for i = 1, 12 do assert.is_true(math.abs(losses[1][i] - losses[2][i]) <= 1e-5 * losses[1][i]) end
  end)
end)

describe("a resumed run", function()
  for _, c in ipairs { { "alone", "", nil }, { "alone in f16", "--precision f16" }, { "alone in bf16", "--precision bf16" },
    { "on 2 ranks", "", 2 }, { "on 3 ranks", "", 3 } } do
    it(c[1] .. " continues with the same bits", function()
      local whole, cut = support.folder(), support.folder()
      train(whole, c[2], c[3])
      train(cut, c[2] .. " --steps 7", c[3])
      assert.are.same({ 5, 7 }, steps(cut))
      local text = train(cut, c[2] .. " --resume auto", c[3])
      assert.is_truthy(text:find "from step 7")
      assert.is_true(bits(whole, 12) == bits(cut, 12))
    end)
  end
  it("takes a checkpoint by name", function()
    local whole, other = support.folder(), support.folder()
    train(whole)
    train(other, ("--resume %s/step-00000005"):format(whole))
    assert.is_true(bits(whole, 12) == bits(other, 12))
  end)
  it("that has nothing to resume starts at the beginning", function()
    local a, b = support.folder(), support.folder()
    train(a)
    train(b, "--resume auto")
    assert.is_true(bits(a, 12) == bits(b, 12))
  end)
  it("goes back to the last whole checkpoint when the newest is damaged", function()
    local a, b = support.folder(), support.folder()
    train(a)
    train(b)
    support.write(b .. "/step-00000012/model.safetensors", "cut off")
    local code, text = support.run(("%s --dir %s --resume auto"):format(script, b))
    if code == 0 then
      assert.is_true(bits(a, 12) == bits(b, 12))
    else
      assert.is_truthy(text:find "step%-00000012.*;", text) -- or says so and what to do
    end
  end)
  it("appends to metrics.jsonl", function()
    local dir, out = support.folder(), support.folder()
    train(dir, "--steps 7 --out " .. out)
    train(dir, "--resume auto --out " .. out)
    assert.are.same({ 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 }, support.metric(out .. "/metrics.jsonl", "step"))
  end)
end)

describe("checkpoints", function()
  it("keep as many as asked for", function()
    local dir = support.folder()
    train(dir, "--every 2 --keep 2")
    assert.are.same({ 10, 12 }, steps(dir))
    assert.is_nil(support.list(dir):find "tmp")
  end)
  it("of ranks are one rank's work, equal to the state of all", function()
    local dir = support.folder()
    train(dir, "", 3)
    assert.are.same({ 5, 10, 12 }, steps(dir))
    local t = dt.load(dir .. "/step-00000012/model.safetensors")
    assert.are.same({ 32, 8 }, t["0.weight"]:shape())
  end)
end)

describe("a run that is asked to stop", function()
  -- Starts a slow run, sends the signal once the first checkpoint is there, and returns what it left.
  local function interrupted(signal, ranks)
    local dir = support.folder()
    local start = ranks and ("exec %s/tests/tools/ranks %d"):format(support.root, ranks) or "exec"
    local line = ([[%s %s %s --dir %s --slow 0.02 --steps 5000 > %s/log 2>&1 & pid=$!
      for i in $(seq 200); do [ -e %s/step-00000005/manifest.json ] && break; sleep 0.05; done
      kill -%s %s; wait $pid; echo code $?]]):format(start, support.quote(support.dtrain), script, dir, dir, dir, signal,
      ranks and "$(pgrep -P $pid dtrain)" or "$pid")
    local _, text = support.sh("sh -c " .. support.quote(line), { seconds = 40 })
    return dir, tonumber(text:match "code (%d+)"), support.read(dir .. "/log") or text
  end
  for _, c in ipairs { { "INT", nil }, { "TERM", nil }, { "TERM", 2 }, { "HUP", nil }, { "USR1", 2 },
    { "USR2", nil } } do
    local where = c[2] and (" on %d ranks"):format(c[2]) or " alone"
    it(("by SIG%s%s saves and stops, with the bits of an undisturbed run"):format(c[1], where), function()
      local dir, code, text = interrupted(c[1], c[2])
      assert.are.equal(75, code, text)
      assert.is_truthy(text:find "stopped after step", text)
      local done = steps(dir)
      local last = done[#done]
      assert.is_true(last >= 5 and last < 5000)
      local whole = support.folder()
      train(whole, ("--every 1000 --steps %d"):format(last), c[2])
      assert.is_true(bits(dir, last) == bits(whole, last))
    end)
  end
end)

describe("mpirun that kills before a slow step has ended", function()
  local body = [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local rows = function() require "dtrain.core".sleep(0.35) return dt.ones { 10 }, dt.ones { 5 } end
return dt.job { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 8, optimizer = optim.SGD { lr = 0.1 }, steps = 1000,
  data = data.from(rows, 40), checkpoint = { dir = "ck" }, log_every = 2 }]]
  -- Sends SIGTERM to mpirun after its first lines.
  local function stopped(flags)
    local dir = support.folder()
    support.write(dir .. "/a.lua", body)
    local line = ([[sh %s/tests/tools/ranks 2 %s a.lua > log 2>&1 & pid=$!; for i in $(seq 200); do grep -q "step 2/" log && break
      sleep 0.1; done; kill -TERM $pid; wait $pid; cat log]]):format(support.root, support.quote(support.dtrain))
    local _, text = support.sh("sh -c " .. support.quote(line), { dir = dir, seconds = 60, env = flags })
    return text, support.list(dir)
  end
  it("is told of, with what to set", function()
    local text = stopped "LC_ALL=C"
    assert.matches("note: a step takes %d[%d.]* s, and mpirun ends its ranks 1.2 s after a SIGTERM, before they have saved; "
      .. "start it with mpirun %-%-mca odls_base_sigkill_timeout %d%d", text)
  end)
  it("waits for the save when it is set", function()
    local text, files = stopped "OMPI_MCA_odls_base_sigkill_timeout=20"
    assert.is_nil(text:find "note: a step takes")
    assert.matches("stopped after step %d+; saved", text)
    assert.matches("manifest.json", files)
  end)
end)

describe("a rank that waits", function()
  local function stalled(body, words)
    local dir = support.folder()
    support.write(dir .. "/a.lua", 'local dt = require "dtrain"\nlocal nn, optim, data = dt.nn, dt.optim, dt.data\n' .. body)
    return support.run("a.lua", { dir = dir, ranks = 2, seconds = 40, env = "DT_STALL_SECONDS=1 " .. (words or "") })
  end
  it("says so again and again", function()
    local code, text = stalled "if dt.rank() == 0 then require 'dtrain.core'.sleep(4.5) end dt.barrier()"
    assert.are.equal(0, code, text)
    assert.matches("has waited 1 s for rank 0", text)
    assert.matches("has waited [23] s for rank 0", text)
  end)
  it("ends the job where DT_STALL_ABORT asks for it", function()
    local code, text, seconds = stalled("if dt.rank() == 0 then require 'dtrain.core'.sleep(20) end dt.barrier()", "DT_STALL_ABORT=1")
    assert.are_not.equal(0, code, text)
    assert.is_true(seconds < 12, text)
  end)
  it("does not end it while a checkpoint is written", function()
    local code, text = stalled([[
local engine = dt.engine(dt.job { model = nn.Sequential { nn.Linear(2000, 5000), nn.Linear(5000, 5) }, loss = nn.MSE(), batch = 4,
  optimizer = optim.SGD { lr = 0.01 }, data = data.synthetic { inputs = { 2000 }, targets = { 5 }, samples = 100 }, steps = 2 })
for _, batch in engine:batches() do engine:step(batch) end
if dt.rank() == 0 then -- the writer stands still for a while
  os.execute [=[pid=$PPID; ( for i in $(seq 2000); do ls ck/*.tmp > /dev/null 2>&1 && break; sleep 0.002; done
    kill -STOP $pid; sleep 3.5; kill -CONT $pid ) > /dev/null 2>&1 &]=]
end
engine:save "ck"
if dt.rank() == 0 then print "saved" end]], "DT_STALL_ABORT=1")
    assert.are.equal(0, code, text)
    assert.matches("busy with writing a checkpoint", text)
    assert.matches("saved\n", text)
  end)
end)

describe("ranks", function()
  it("print on rank 0 only", function()
    local text = train(support.folder(), "", 3)
    local _, n = text:gsub("step 12/12", "")
    assert.are.equal(1, n)
  end)
  it("tell what they are", function()
    local dir = support.folder()
    support.write(dir .. "/who.lua", [[
      local dt = require "dtrain"
      local all = dt.all_gather(dt.tensor({ dt.rank(), dt.size(), dt.local_rank(), dt.local_size() }, "i32"))
      local sum = dt.all_reduce(dt.rank() + 1, "sum")
      local mean = dt.all_reduce(dt.full({ 3 }, dt.rank()), "mean"):totable()
      local mine = dt.reduce_scatter(dt.arange(dt.size() * 2), "sum"):totable()
      local said = dt.broadcast(dt.full({ 2 }, dt.rank() * 10), 1):totable()
      local swapped = dt.all_to_all(dt.arange(dt.size()) + 10 * dt.rank()):totable()
      dt.barrier()
      if dt.rank() == 1 then
        local words = {}
        for _, row in ipairs(all:totable()) do words[#words + 1] = table.concat(row, " ") end
        print(table.concat(words, ", ") .. (": %g %g %g %g %g %g"):format(sum, mean[1], mine[1], said[1], swapped[1], swapped[3]))
      end]])
    local code, text = support.run(dir .. "/who.lua", { ranks = 3 })
    assert.are.equal(0, code, text)
    assert.are.equal("0 3 0 3, 1 3 1 3, 2 3 2 3: 6 1 6 10 1 21", (text:gsub("\n", "")))
  end)
  it("exchange parts of one size: others are an error that names it, at the prompt and in a model", function()
    local dir = support.folder()
    support.write(dir .. "/now.lua", [[local dt = require "dtrain"
dt.all_to_all(dt.ones { 3, 2 })]])
    support.write(dir .. "/model.lua", [[local dt = require "dtrain"
local Turn = dt.nn.module "Turn"
function Turn:init() self.line = dt.nn.Linear(4, 3) end
function Turn:forward(x) return (self.line(x):all_to_all "data") end
return dt.job { model = Turn(), loss = function(y) return y:mean() end, batch = 6, steps = 1, optimizer = dt.optim.SGD { lr = 0.1 },
  data = dt.data.synthetic { inputs = { 4 }, targets = { 1 }, samples = 12 } }]])
    for _, c in ipairs {
      { "now", "now.lua:2: all_to_all: the first dim must divide by the 2 ranks, but has size 3; pad or trim it" },
      { "model", "model.lua:4: all_to_all: dim 0 of [3,3] does not divide by 2 ranks; 2 or 4 would" } } do
      local code, text = support.run(("%s/%s.lua"):format(dir, c[1]), { ranks = 2 })
      assert.are.equal(1, code, text)
      assert.is_truthy(text:find(c[2], 1, true), text)
    end
  end)
  for _, hosts in ipairs { 2, 3 } do
    it(("on %d pretended hosts, in pieces of 64 bytes, train as one process does"):format(hosts), function()
      local line = "tests/dist/steps.lua --script tests/dist/dropout.lua --global 12 --samples 50 --steps 5 --quiet "
        .. "--save %s/%s.safetensors"
      local dir = support.folder()
      local code, text = support.run(line:format(dir, "a"))
      assert.are.equal(0, code, text)
      code, text = support.run(line:format(dir, "b"), { ranks = 4, env = "DT_COMM_HOSTS=" .. hosts .. " DT_COMM_CHUNK=64" })
      assert.are.equal(0, code, text)
      local a, b = dt.load(dir .. "/a.safetensors"), dt.load(dir .. "/b.safetensors")
      for name, t in dt.sorted(a) do
        assert.is_true(dt.allclose(b[name], t, { rtol = 1e-5, atol = 1e-6 }), name)
      end
    end)
  end
end)

describe("batch norms on ranks", function()
  for _, c in ipairs { { "{}", 2 }, { "{}", 3, "--micro 4" }, { "{}", 2, "--precision f16" }, { "{ zero = 1 }", 2 },
    { "{ zero = 3 }", 2 }, { "{ tensor = 2 }", 2 }, { "{ pipeline = 2 }", 4, "--micro 4" }, { "{ sync = { every = 2 } }", 2 },
    { "{ independent = true }", 2 } } do
    it(("take the mean of what replicas gathered, in the plan, under %s %s"):format(c[1], c[3] or ""), function()
      local words = ("tests/dist/batch_norms.lua --parallel %s %s"):format(support.quote(c[1]), c[3] or "")
      local code, text = support.run(words, { ranks = c[2] })
      assert(code == 0, text)
      local micros = c[3] and c[3]:find "micro" -- statistics of one microbatch after another are no mean of all
      if not micros then assert.is_true(tonumber(text:match "running mean off by ([%d.e+-]+)") <= 1e-3, text) end
      assert.is_truthy(text:find("\n0 collectives of no plan", 1, true), text)
    end)
  end
end)
