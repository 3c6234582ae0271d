-- Jobs, engines and the training loop, in this process and through the program.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local program = (os.getenv "DT_BUILD" or "build") .. "/dtrain"
local folder = os.tmpname()
os.remove(folder)
os.execute("mkdir -p " .. folder)

local function message(f, ...)
  local ok, e = pcall(f, ...)
  assert.is_false(ok)
  return e
end

local function job(more)
  local spec = {
    model = nn.Linear(10, 5), loss = nn.MSE(), batch = 32, optimizer = optim.SGD { lr = 0.05 }, steps = 40,
    data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 300 },
  }
  for k, v in dt.sorted(more or {}) do spec[k] = v end
  return dt.job(spec)
end

local function run(command)
  local p = io.popen(command .. " 2>&1")
  local text = p:read("a")
  local _, _, code = p:close()
  return text, code
end

describe("dt.engine", function()
  teardown(function() os.execute("rm -rf " .. folder) end)

  it("trains, and the loss falls", function()
    local engine, first, last = dt.engine(job()), nil, nil
    for step, batch in engine:batches() do
      local m = engine:step(batch)
      first = first or m.loss
      last = m.loss
      assert.are.equal(step, engine.step_number)
      assert.is_true(m.samples_per_second > 0)
    end
    assert.are.equal(40, engine.step_number)
    assert.is_true(last < 0.5 * first, ("%g to %g"):format(first, last))
  end)

  it("gives the same losses for any microbatch", function()
    local function losses(batch)
      local engine, out = dt.engine(job { model = nn.Linear(10, 5), batch = batch, steps = 12 }), {}
      for step in engine:batches() do out[step] = engine:step().loss end
      return out
    end
    local a, b = losses(32), losses { global = 32, micro = 7 }
    for i = 1, 12 do assert.is_true(math.abs(a[i] - b[i]) <= 1e-5 * math.abs(a[i]),
      ("step %d: %g, %g"):format(i, a[i], b[i])) end
  end)

  it("evaluates the exact set", function()
    local x, t = dt.randn({ 50, 10 }, 1), dt.randn({ 50, 5 }, 2)
    local model = nn.Linear(10, 5)
    local engine = dt.engine(job { model = model, eval = { data = data.tensors { inputs = x, targets = t } } })
    engine:step()
    local want = nn.mse(model(x), t):item()
    assert.is_true(math.abs(engine:eval().loss - want) < 1e-5 * want)
  end)

  it("computes accuracy, top-k and perplexity", function()
    local x = dt.randn({ 37, 10 }, 1)
    local labels = {}
    for i = 1, 37 do labels[i] = i % 5 end
    labels[3] = -100
    local y = dt.tensor(labels, "i64")
    local model = nn.Linear(10, 5)
    local engine = dt.engine(dt.job { model = model, loss = nn.CrossEntropy(), optimizer = optim.SGD { lr = 0.0 },
      steps = 1,
      batch = 8, data = data.tensors { inputs = x, targets = y },
      eval = { data = data.tensors { inputs = x, targets = y }, metrics = { "accuracy", "top_2", "perplexity" } } })
    local got = engine:eval()
    local logits, hits, top2 = model(x):totable(), 0, 0
    for i = 1, 37 do
      local larger = 0
      for c = 1, 5 do if labels[i] >= 0 and logits[i][c] > logits[i][labels[i] + 1] then larger = larger + 1 end end
      if labels[i] >= 0 and larger == 0 then hits = hits + 1 end
      if labels[i] >= 0 and larger < 2 then top2 = top2 + 1 end
    end
    assert.is_true(math.abs(got.accuracy - hits / 36) < 1e-6)
    assert.is_true(math.abs(got.top_2 - top2 / 36) < 1e-6)
    assert.is_true(math.abs(got.perplexity - math.exp(got.loss)) < 1e-4)
  end)

  it("continues from a checkpoint with the same bits", function()
    local dir = folder .. "/ckpt"
    local function train(steps, resume)
      require("dtrain.cli").given = { resume = resume }
      local engine, out = dt.engine(job { model = nn.Sequential { nn.Linear(10, 8), nn.Dropout(0.2), nn.Linear(8, 5) },
        optimizer = optim.Adam { lr = 0.01 }, steps = 20, checkpoint = { dir = dir } }), {}
      require("dtrain.cli").given = {}
      for step, batch in engine:batches() do
        if step > steps then break end
        out[step] = engine:step(batch).loss
      end
      return engine, out
    end
    local _, whole = train(20)
    local engine = train(8)
    engine:save()
    local resumed, rest = train(20, "auto")
    assert.are.equal(8, resumed.start)
    for step = 9, 20 do assert.are.equal(whole[step], rest[step]) end
  end)

  it("wants one step for each batch, and a job", function()
    local engine = dt.engine(job())
    local _, batch = engine:batches()()
    engine:step(batch)
    assert.matches("one step for each batch", message(engine.step, engine, batch))
    assert.matches("wants a job", message(dt.engine, {}))
  end)
end)

describe("dt.job", function()
  it("checks its keys at the script's line", function()
    local e = message(function() job { precison = "f32" } end)
    assert.matches("job_spec%.lua:%d+: dt%.job has no option 'precison'; did you mean 'precision'", e)
  end)
  it("needs what it cannot do without", function()
    assert.matches("needs 'model'", message(dt.job, { loss = nn.MSE() }))
    assert.matches("needs steps or epochs", message(function()
      dt.engine(dt.job { model = nn.Linear(2, 2), loss = nn.MSE(), batch = 1, optimizer = optim.SGD {},
        data = data.synthetic { inputs = { 2 }, targets = { 2 } } })
    end))
  end)
  it("counts epochs", function()
    local engine = dt.engine(dt.job { model = nn.Linear(2, 2), loss = nn.MSE(), batch = 32, optimizer = optim.SGD {},
      epochs = 2,
      data = data.synthetic { inputs = { 2 }, targets = { 2 }, samples = 100 } })
    assert.are.equal(8, engine.steps)
  end)
end)

describe("the program", function()
  it("trains a script, writes metrics and prints plain lines", function()
    local out = folder .. "/run"
    local text, code = run(program .. " examples/linear.lua --steps 5 --out " .. out)
    assert.are.equal(0, code, text)
    assert.matches("step 5/5  loss", text)
    local n = 0
    for line in io.lines(out .. "/metrics.jsonl") do
      n = n + 1
      assert.matches('^{"step":' .. n .. ',"epoch":%d+,"loss":[%d.e-]+,"lr":0.01,', line)
      for _, key in ipairs { "samples_per_second", "step_ms", "seconds" } do assert.matches('"' .. key .. '":',
        line) end
    end
    assert.are.equal(5, n)
  end)
  it("takes options before and after the script", function()
    local text, code = run(program .. " run --quiet examples/linear.lua --steps 3 --lr 0.1")
    assert.are.equal(0, code, text)
    assert.are.equal("", text)
  end)
  it("plans in bytes", function()
    local text, code = run(program .. " plan examples/linear.lua --ranks 3")
    assert.are.equal(0, code, text)
    assert.matches("optimizer states", text)
    assert.matches("total +[%d,]+", text)
  end)
  it("explains collectives", function()
    local text, code = run(program .. " explain examples/linear.lua --ranks 2")
    assert.are.equal(0, code, text)
    assert.matches("all_reduce", text)
  end)
  it("lists a script's options and its own", function()
    local text, code = run(program .. " examples/gpt_text.lua --help")
    assert.are.equal(0, code, text)
    assert.matches("%-%-preset WORD", text)
    assert.matches("%-%-resume", text)
  end)
  it("names the nearest verb and option", function()
    local text, code = run(program .. " pln examples/linear.lua")
    assert.are_not.equal(0, code)
    assert.matches("did you mean 'plan'", text)
    text, code = run(program .. " examples/linear.lua --step 3")
    assert.are_not.equal(0, code)
    assert.matches("did you mean %-%-steps", text)
  end)
  it("has a prompt", function()
    local text, code = run("printf 'x = dt.ones{2}\\nx:sum():item()\\nfor i=1,2 do\\nprint(i)\\nend\\nnn.Linaer\\n' | "
      .. program .. " repl")
    assert.are.equal(0, code, text)
    assert.matches("2.0\n1\n2\n", text)
    assert.matches("did you mean 'nn.Linear'", text)
  end)
  for _, name in ipairs { "own_loop", "own_model", "own_optimizer" } do
    it("runs " .. name .. ".lua", function()
      local text, code = run(program .. " examples/" .. name .. ".lua" .. (name == "own_loop" and "" or " --epochs 2"))
      assert.are.equal(0, code, text)
    end)
  end
  it("stops at a signal and saves", function()
    local out = folder .. "/stop"
    local text, code = run(("timeout -s INT 1 %s examples/linear.lua --steps 50000000 --out %s"):format(program, out))
    assert.is_true(code == 75 or code == 124, text)
    assert.matches("stopped after step %d+; saved", text)
    text, code = run(("%s examples/linear.lua --steps 1 --resume auto --out %s"):format(program, out))
    assert.are.equal(0, code, text)
  end)
end)
