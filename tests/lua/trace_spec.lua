-- --trace: the file is JSON that viewers read, says what every rank did and when, nests, and survives a rank that dies.
local core = require "dtrain.core"
local support = require "support"

local strategy = support.root .. "/tests/dist/strategy.lua"

-- A file of `lines` without the closing bracket, as JSON all the same.
local function prefix(path)
  local text = assert(support.read(path), path)
  assert.are.equal("[\n", text:sub(1, 2))
  local at = support.folder() .. "/prefix.json"
  support.write(at, text:gsub(",\n$", "\n]"))
  return core.json(at)
end

-- The spans of a trace by "rank:tid", each list in the order of time; all that is true of every trace is asserted.
local function spans(events)
  local by, names = {}, {}
  for _, e in ipairs(events) do
    assert.is_string(e.name)
    assert.is_string(e.ph)
    if e.ph == "X" then
      assert.is_true(e.ts >= 0 and e.dur >= 0 and e.args.step >= 1 and #e.name > 0)
      local key = ("%d:%d"):format(e.pid, e.tid)
      by[key] = by[key] or {}
      table.insert(by[key], e)
      names[e.name] = (names[e.name] or 0) + 1
    end
  end
  for key, list in pairs(by) do -- luacheck: ignore
    table.sort(list, function(a, b) if a.ts ~= b.ts then return a.ts < b.ts end return a.dur > b.dur end)
    local open = {}
    for _, e in ipairs(list) do
      while #open > 0 and open[#open] <= e.ts + 0.0005 do table.remove(open) end
      assert.is_true(#open == 0 or e.ts + e.dur <= open[#open] + 0.0015, key .. " " .. e.name .. " overlaps")
      open[#open + 1] = e.ts + e.dur
    end
  end
  return by, names
end

local function traced(words, ranks, options)
  local path = support.folder() .. "/t.json"
  local code, text = support.run(("%s --trace %s"):format(words, support.quote(path)), { ranks = ranks, seconds = 60,
    env = options and options.env, dir = options and options.dir })
  assert.are.equal(0, code, text)
  local by, names = spans(core.json(path))
  return by, names, text
end

local function count(list, pattern)
  local n = 0
  for _, e in ipairs(list or {}) do if e.name:find(pattern) then n = n + 1 end end
  return n
end

describe("a trace", function()
  it("of one process has steps, microbatches and instructions with their lines", function()
    local by, names = traced(strategy .. " --micro 6")
    assert.are.equal(1, names["step 1"])
    assert.are.equal(2, names["microbatch 3"]) -- the third step has 12 samples
    local seen = 0
    for _, e in ipairs(by["0:0"]) do
      if e.name == "attention" then
        seen = seen + 1
        assert.is_truthy(e.args.at:find "strategy%.lua:%d+$")
        assert.is_true(e.args.flops > 0 and e.args.bytes > 0 and e.args.microbatch >= 0)
      end
    end
    assert.is_true(seen > 0)
  end)
  for _, c in ipairs { { "data parallelism", "--micro 6" }, { "ZeRO", "--parallel zero=2 --micro 6" } } do
    it("of 2 ranks with " .. c[1] .. " has both, with buckets and bytes", function()
      local by, names = traced(strategy .. " " .. c[2], 2)
      assert.are.equal(2, names["step 3"])
      for rank = 0, 1 do
        assert.is_true(#by[rank .. ":0"] > 20)
        local buckets = 0
        for _, e in ipairs(by[rank .. ":1"]) do
          if e.args.bucket then
            buckets = buckets + 1
            assert.is_true(e.args.bytes > 0 and e.args.ranks == 2)
          end
        end
        assert.is_true(buckets > 2)
        assert.is_true(count(by[rank .. ":0"], "^wait for") >= 3)
      end
    end)
  end
  it("of tensor parallelism shows collectives of both phases", function()
    local by = traced(strategy .. " --parallel tensor=2", 2)
    local phases = {}
    for _, e in ipairs(by["1:1"]) do phases[e.args.phase] = true end
    assert.is_true(phases.forward and phases.backward)
  end)
  it("of a pipeline shows its actions and messages", function()
    local by = traced(strategy .. " --parallel pipeline=2 --micro 6", 2)
    for rank = 0, 1 do
      local list = by[rank .. ":0"]
      assert.are.equal(10, count(list, "^F of chunk 0"))
      assert.are.equal(10, count(list, "^B of chunk 0"))
      assert.is_true(count(list, "^send to stage") == 10)
      assert.is_true(count(list, "^receive from stage") == 10)
    end
  end)
  it("shows an own loop's evaluations, and steps in pieces", function()
    local dir = support.folder()
    support.write(dir .. "/own.lua", [[
      local dt = require "dtrain"
      local nn, optim, data = dt.nn, dt.optim, dt.data
      local engine = dt.engine(dt.job { model = nn.Linear(4, 2), loss = nn.MSE(), batch = 8, optimizer = optim.SGD { lr = 0.1 },
        data = data.synthetic { inputs = { 4 }, targets = { 2 }, samples = 64 }:split { train = 48, valid = 16 }, steps = 4 })
      for step, batch in engine:microbatches() do
        engine:backward(engine:forward(batch))
        if engine:step() then engine:eval() end
      end]])
    local _, names, text = traced(dir .. "/own.lua")
    assert.are.equal(4, names["evaluation"], text)
    assert.are.equal(4, names["backward of microbatch 0"])
    assert.are.equal(1, names["step 4"])
  end)
  it("of a step with more events than fit in memory is whole", function()
    local dir = support.folder()
    support.write(dir .. "/many.lua", [[
      local dt = require "dtrain"
      local nn, optim, data = dt.nn, dt.optim, dt.data
      return dt.job { model = nn.Linear(4, 2), loss = nn.MSE(), batch = { global = 9000, micro = 1 }, steps = 1,
        optimizer = optim.SGD { lr = 0.1 }, data = data.synthetic { inputs = { 4 }, targets = { 2 }, samples = 9000 } }]])
    local by, names = traced(dir .. "/many.lua")
    assert.is_true(#by["0:0"] > 65536 and names["the trace is written"] >= 1)
    assert.are.equal(9000, count(by["0:0"], "^microbatch"))
  end)
  it("has names with quotes and backslashes as they are", function()
    local dir = support.folder()
    local name = 'a "b" \\c\n.lua'
    support.write(dir .. "/" .. name, assert(support.read "examples/linear.lua"))
    local by = traced(support.quote(name) .. " --steps 2", nil, { dir = dir })
    local found
    for _, e in ipairs(by["0:0"]) do found = found or (e.args.at or ""):find(name, 1, true) end
    assert.is_truthy(found)
  end)
  it("has only the steps asked for", function()
    local by = traced("examples/linear.lua --steps 6 --trace-steps 3-4")
    for _, e in ipairs(by["0:0"]) do assert.is_true(e.args.step == 3 or e.args.step == 4) end
    assert.are.equal(2, count(by["0:0"], "^step %d"))
  end)
  it("changes no bit, and a run without it writes nothing", function()
    local dir = support.folder()
    local words = "tests/dist/resume.lua --steps 4 --dir "
    local a, b = support.folder(), support.folder()
    assert.are.equal(0, (support.run(words .. a .. " --trace " .. dir .. "/t.json", { ranks = 2 })))
    assert.are.equal(0, (support.run(words .. b, { ranks = 2 })))
    local at = "/step-00000004/model.safetensors"
    assert.is_true(assert(support.read(a .. at)) == assert(support.read(b .. at)))
    assert.are.equal("./t.json\n", support.list(dir))
  end)
  it("of a rank that dies is read up to where it died", function()
    local dir = support.folder()
    support.write(dir .. "/dies.lua", [[
      local dt = require "dtrain"
      local nn, optim, data = dt.nn, dt.optim, dt.data
      local engine = dt.engine(dt.job { model = nn.Linear(4, 2), loss = nn.MSE(), batch = 8, optimizer = optim.SGD { lr = 0.1 },
        data = data.synthetic { inputs = { 4 }, targets = { 2 }, samples = 64 }, steps = 40 })
      for step, batch in engine:batches() do
        engine:step(batch)
        if step == 5 and dt.rank() == 1 then os.execute "kill -9 $PPID" end
      end]])
    local code = support.run(("%s/dies.lua --trace %s/t.json"):format(dir, dir), { ranks = 2, seconds = 40 })
    assert.are_not.equal(0, code)
    assert.is_nil(assert(support.read(dir .. "/t.json")):find("]\n$"))
    local by = spans(prefix(dir .. "/t.json"))
    assert.are.equal(5, count(by["1:0"], "^step %d"))
    assert.is_true(count(by["0:0"], "^step %d") >= 5)
  end)
  it("goes to a rank's own file where it cannot reach the common one", function()
    local a, b = support.folder(), support.folder()
    local run = ("%s %s/examples/linear.lua --steps 3 --trace t.json"):format(support.quote(support.dtrain), support.root)
    local code, text = support.sh(("%s/tests/tools/ranks 1 -wdir %s %s : -n 1 -wdir %s %s"):format(support.root, a, run, b, run))
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find("the trace of rank 1 is in t.rank1.json", 1, true), text)
    local first, second = spans(core.json(a .. "/t.json")), spans(core.json(b .. "/t.rank1.json"))
    assert.is_true(first["0:0"] ~= nil and first["1:0"] == nil and second["1:0"] ~= nil and second["0:0"] == nil)
  end)
end)

describe("--trace", function()
  it("with a file that cannot be written is an error before the first step, once", function()
    for _, ranks in ipairs { false, 2 } do
      local code, text, seconds = support.run("examples/linear.lua --steps 2 --trace /nowhere/t.json", { ranks = ranks or nil })
      assert.are_not.equal(0, code)
      local _, n = text:gsub("/nowhere/t.json: cannot write the file: No such file or directory; give", "")
      assert.are.equal(1, n, text)
      assert.is_nil(text:find "step 1/2")
      assert.is_true(seconds < 20)
    end
  end)
  it("refuses bad options with what to do", function()
    for words, message in pairs { -- luacheck: ignore
      ["--trace-steps 1-2"] = "give --trace FILE, too", ["--trace t.json --trace-steps 3-1"] = "--trace-steps wants steps",
      ["--trace t.json --trace-steps x"] = "got 'x'", ["--trace="] = "--trace wants the name of a file" } do
      local code, text = support.run("examples/linear.lua --steps 2 " .. words, { dir = support.root })
      assert.are_not.equal(0, code)
      assert.is_truthy(text:find(message, 1, true), text)
    end
  end)
end)
