-- The six programs of examples/ported against PyTorch's losses, steps in pieces, and DeepSpeed's configurations.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local core = require "dtrain.core"
local support = require "support"

local reference = dofile "tests/data/programs.lua"
local values = "--data tests/data/programs.safetensors"

local function message(f, ...)
  local ok, e = pcall(f, ...)
  assert.is_false(ok)
  return e
end

-- Whether `parallel` knows these options yet.
local function knows(parallel)
  local ok, e = pcall(function() return require("dtrain.strategy").new(parallel) end)
  return ok or not tostring(e):find("has no option", 1, true)
end

-- The last number of each line that rank 0 printed, in order.
local function losses_of(text)
  local out = {}
  for line in text:gmatch "[^\n]+" do
    local loss = line:match "[lL]oss:?%s+([%d.e+-]+)$"
    if loss then out[#out + 1] = tonumber(loss) end
  end
  return out
end

local function agree(want, text)
  local got = losses_of(text)
  assert.are.equal(#want, #got, text)
  for i, w in ipairs(want) do
    assert.is_true(math.abs(got[i] - w[3]) <= 1e-5 * w[3] + 0.6e-7, -- 7 digits are printed
      ("epoch %d batch %d: %.9g, PyTorch %.9g"):format(w[1], w[2], got[i], w[3]))
  end
end

-- { program, words, ranks, name in the reference [, an option of `parallel` that it needs] }
local cases = {
  { "deepspeed", "", 1, "deepspeed_1" },
  { "megatron", "", 1, "megatron", { tensor = 1, pipeline = 1 } },
  { "megatron", "--micro-batch-size 8", 1, "megatron", { tensor = 1, pipeline = 1 } },
  { "megatron", "--tensor-model-parallel-size 2", 2, "megatron", { tensor = 2, pipeline = 1 } },
  { "megatron", "--pipeline-model-parallel-size 2 --micro-batch-size 8", 2, "megatron", { tensor = 1, pipeline = 2 } },
  { "megatron", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro_batch_size 8", 4, "megatron",
    { tensor = 2, pipeline = 2 } },
  { "megatron", "", 2, "megatron", { tensor = 1, pipeline = 1 } }, -- two replicas share the batch
  { "ray", "", 2, "ray_2", { independent = true } },
}
for _, ranks in ipairs { 1, 2, 4 } do
  cases[#cases + 1] = { "horovod", "", ranks, "horovod_" .. ranks }
  cases[#cases + 1] = { "elastic", "--backend " .. (ranks == 1 and "self" or "mpi"), ranks, "elastic_" .. ranks }
end

describe("the program", function()
  for _, c in ipairs(cases) do
    local name, words, ranks, want, needs = table.unpack(c)
    it(("%s.lua %s on %d rank%s prints PyTorch's losses"):format(name, words, ranks, ranks == 1 and "" or "s"), function()
      if needs and not knows(needs) then return pending "the strategy isn't there" end
      local code, text = support.run(("examples/ported/%s.lua %s %s"):format(name, values, words),
        { ranks = ranks > 1 and ranks or nil })
      assert.are.equal(0, code, text)
      agree(reference[want], text)
    end)
  end

  it("elastic.lua ends with PyTorch's weights, also after a restart", function()
    local dir = support.folder()
    for _, words in ipairs { "--steps 77", "--resume auto" } do
      local code, text = support.run(("examples/ported/elastic.lua %s --checkpoint %s %s"):format(values, dir, words),
        { ranks = 2 })
      assert.are.equal(0, code, text)
    end
    local got = dt.load(dir .. "/step-00000160/model.safetensors")
    local all = dt.load "tests/data/programs.safetensors"
    for _, key in ipairs { "weight", "bias" } do
      assert.is_true(dt.allclose(got[key], all["elastic_2." .. key], { rtol = 1e-5, atol = 1e-6 }))
    end
  end)

  it("elastic.lua knows its backends", function()
    local code, text = support.run "examples/ported/elastic.lua --backend nccl"
    assert.are_not.equal(0, code)
    assert.matches("%-%-backend nccl is unknown.*known: auto, mpi, self", text)
    code, text = support.run "examples/ported/elastic.lua --backend mpi"
    assert.are_not.equal(0, code)
    assert.matches("elastic.lua:%d+: the backend mpi needs a launcher.*mpirun", text)
    code, text = support.run("examples/ported/elastic.lua --backend self --epochs 1", { ranks = 2 })
    assert.are.equal(0, code, text)
    assert.are.equal(8, #losses_of(text)) -- each process prints its own
  end)

  it("runs on data of its own, and plans for ranks that aren't there", function()
    for _, name in ipairs { "horovod", "deepspeed", "elastic" } do
      local code, text = support.run(("examples/ported/%s.lua --epochs 1"):format(name))
      assert.are.equal(0, code, text)
      assert.are.equal(4, #losses_of(text))
    end
    local code, text = support.run "plan examples/ported/horovod.lua --ranks 8"
    assert.are.equal(0, code, text)
    assert.matches("8 ranks, f32, batch 256: 1 microbatch of 32", text)
  end)

  it("is short", function()
    for file in support.list("examples/ported"):gmatch "[^\n]+%.lua" do
      local n = 0
      for line in io.lines("examples/ported/" .. file) do
        if line:find "%S" and not line:find "^%s*%-%-" then n = n + 1 end
      end
      assert.is_true(n <= 30, ("%s has %d lines"):format(file, n))
    end
  end)
end)

describe("deepspeed_mnist.lua", function()
  local images = "/usr/share/datasets/fashion-mnist"
  -- Losses of some hundred steps with the program's own configuration, changed by `edit`.
  local function train(ranks, edit)
    local dir = support.folder()
    support.write(dir .. "/ds.json", edit(support.read "examples/ported/deepspeed_mnist.json"))
    local words = "examples/ported/deepspeed_mnist.lua --deepspeed_config %s/ds.json --steps 200 --seed 3 --quiet --out %s"
    local code, text = support.run(words:format(dir, dir), { ranks = ranks, seconds = 120 })
    assert.are.equal(0, code, text)
    return support.metric(dir .. "/metrics.jsonl", "loss")
  end
  local function stage(n) return function(s) return (s:gsub('"stage": %d', '"stage": ' .. n)) end end
  local function single(s) return (stage(0)(s):gsub('"enabled": true', '"enabled": false')) end

  local function close(a, b, share)
    assert.are.equal(200, #a)
    for i = 1, 200 do
      assert.is_true(math.abs(a[i] - b[i]) <= share * b[i], ("step %d: %g, %g"):format(i, a[i], b[i]))
    end
  end

  it("has losses within 2 % of f32's, alone and on 2 ranks", function()
    if not core.exists(images) then return pending "dataset-fashion-mnist isn't there" end
    local want = train(nil, single)
    close(train(nil, stage(0)), want, 0.02)
    close(train(2, stage(0)), want, 0.02)
    assert.is_true(want[200] < 0.6 * want[1])
  end)
  it("the same with ZeRO-2, the configuration as it is", function()
    if not core.exists(images) then return pending "dataset-fashion-mnist isn't there" end
    if not knows { zero = 2 } then return pending "zero isn't there" end
    close(train(2, stage(2)), train(nil, single), 0.02)
  end)
end)

describe("a step in pieces", function()
  local x, y = dt.randn({ 100, 10 }, 1), dt.randn({ 100, 5 }, 2)
  local function engine(more)
    local spec = { model = nn.Sequential { nn.Linear(10, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 5) }, loss = nn.MSE(),
      data = data.tensors { inputs = x, targets = y }, batch = { global = 32, micro = 8 }, clip = 1.0,
      optimizer = optim.Adam { lr = 0.01 }, steps = 10 }
    for k, v in dt.sorted(more or {}) do spec[k] = v end
    return dt.engine(dt.job(spec))
  end
  for _, precision in ipairs { "f32", "f16" } do
    it("has the bits of a whole one in " .. precision, function()
      local a, b, n = engine { precision = precision }, engine { precision = precision }, 0
      for step, batch in a:microbatches() do
        local loss = a(batch)
        a:backward(loss)
        local m = a:step()
        n = n + 1
        assert.are.equal(m ~= nil, batch.micro == batch.micros)
        if m then
          local w = b:step()
          assert.are.equal(w.loss, m.loss)
          assert.are.equal(w.grad_norm, m.grad_norm)
          assert.are.equal(step, a.step_number)
        end
      end
      assert.are.equal(10, a.step_number)
      assert.are.equal(4 + 4 + 4 + 1 + 4 + 4 + 4 + 1 + 4 + 4, n) -- the fourth batch of an epoch has 4 samples
      assert.are.equal(a.exec:digest(), b.exec:digest())
    end)
  end
  it("gives the loss of its own samples after forward", function()
    local model = nn.Linear(10, 5)
    local e = engine { model = model, batch = { global = 200, micro = 100 }, data = data.tensors { inputs = dt.concat({ x, x }, 0),
      targets = dt.concat({ y, y }, 0), order = dt.arange(200) } }
    local _, batch = e:microbatches()()
    local want = nn.mse(model(x), y):item()
    assert.is_true(math.abs(e(batch) - want) <= 1e-6 * want)
  end)
  it("wants each piece once, in order", function()
    local e = engine()
    assert.matches("forward.*no microbatch is under way", message(function() e { } end))
    local nextone = e:microbatches()
    local _, batch = nextone()
    assert.matches("still wants forward", message(nextone))
    assert.matches("backward.*wants forward", message(e.backward, e, 1))
    assert.matches("step.*wants forward", message(e.step, e))
    assert.matches("gave last", message(e.forward, e, {}))
    local loss = e(batch)
    assert.matches("wants the loss of the last forward", message(e.backward, e, 2 * loss))
    e:backward(loss)
    assert.matches("still wants step", message(nextone))
    assert.is_nil(e:step())
  end)
end)

describe("steps in pieces on ranks", function()
  -- 5 ranks, 33 samples in batches of 8, and at the end one sample: ranks have other numbers of microbatches, or none.
  local script = [[
    local dt = require "dtrain"
    local nn, data = dt.nn, dt.data
    local function losses(pieces)
      local e = dt.engine(dt.job { model = nn.Sequential { nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5) }, loss = nn.MSE(),
        data = data.tensors { inputs = dt.randn({ 33, 10 }, 1), targets = dt.randn({ 33, 5 }, 2) }, steps = 12, clip = 1,
        batch = { global = 8, micro = 1 }, optimizer = dt.optim.Adam { lr = 0.01 } })
      local out = {}
      if pieces then
        for _, batch in e:microbatches() do
          e:backward(e(batch))
          local m = e:step()
          if m then out[#out + 1] = ("%a %a"):format(m.loss, m.grad_norm) end
        end
      else
        for _, batch in e:batches() do
          local m = e:step(batch)
          out[#out + 1] = ("%a %a"):format(m.loss, m.grad_norm)
        end
      end
      return table.concat(out, "\n"), e.exec:digest()
    end
    local a, x = losses(true)
    local b, y = losses(false)
    if dt.rank() == 0 then print(a == b and x == y and "same" or a .. "\n---\n" .. b) end]]
  for _, ranks in ipairs { 2, 5 } do
    it(("have the bits of whole ones: %d"):format(ranks), function()
      local path = support.folder() .. "/pieces.lua"
      support.write(path, script)
      local code, text = support.run(path, { ranks = ranks })
      assert.are.equal(0, code, text)
      assert.matches("^same", text)
    end)
  end
end)

describe("an order for each epoch", function()
  it("is followed, and begins anew", function()
    local order = dt.tensor({ { 3, 1 }, { 0, 2 } }, "i64")
    local set = data.tensors { inputs = dt.tensor({ { 0 }, { 1 }, { 2 }, { 3 } }, "f32"), targets = dt.zeros { 4, 1 }, order = order }
    assert.are.equal(2, set:count())
    local e = dt.engine(dt.job { model = nn.Linear(1, 1), batch = 1, steps = 6, data = set, optimizer = optim.SGD {},
      loss = function(out, t, inputs) return dt.mean(inputs) + dt.mean(out * t) end })
    local seen = {}
    for step in e:batches() do seen[step] = e:step().loss end
    assert.are.same({ 3, 1, 0, 2, 3, 1 }, seen)
  end)
  it("must have samples that are there", function()
    assert.matches("order names sample 9", message(data.tensors, { inputs = dt.zeros { 4, 1 },
      order = dt.tensor({ { 0, 1 }, { 9, 1 } }, "i64") }))
  end)
end)

describe("loss scale settings", function()
  local function job(precision)
    return dt.job { model = nn.Linear(4, 2), loss = nn.MSE(), batch = 4, steps = 40, optimizer = optim.SGD { lr = 0.01 },
      precision = precision, data = data.synthetic { inputs = { 4 }, targets = { 2 }, samples = 40 } }
  end
  local function scales(precision)
    local e, out = dt.engine(job(precision)), {}
    for step in e:batches() do out[step] = e:step().loss_scale end
    return out
  end
  it("start, grow after a window, stay where they are fixed", function()
    local s = scales { dtype = "f16", loss_scale = { initial = 8, window = 10 } }
    assert.are.same({ 8, 8, 16, 32 }, { s[1], s[10], s[11], s[21] })
    s = scales { dtype = "f16", loss_scale = 128 }
    assert.are.same({ 128, 128 }, { s[1], s[40] })
    assert.are.equal(65536, scales "f16"[1])
  end)
  it("shrink after the hysteresis' overflows, not below the least", function()
    local e = dt.engine(dt.job { model = nn.Linear(4, 2), loss = function(out, t) return nn.mse(out * 3e4, t) end, batch = 4,
      steps = 8, optimizer = optim.SGD { lr = 0 }, data = data.synthetic { inputs = { 4 }, targets = { 2 }, samples = 40 },
      precision = { dtype = "f16", loss_scale = { initial = 65536, hysteresis = 3, min = 16384 } } })
    local out = {}
    for step in e:batches() do
      local m = e:step()
      assert.is_true(m.skipped)
      out[step] = m.loss_scale
    end
    assert.are.same({ 65536, 65536, 65536, 32768, 16384, 16384, 16384, 16384 }, out)
  end)
  it("are checked", function()
    assert.matches("loss_scale is for f16", message(job, { dtype = "bf16", loss_scale = 8 }))
    assert.matches("initial 1 is below min 2", message(job, { dtype = "f16", loss_scale = { initial = 1, min = 2 } }))
    assert.matches("did you mean 'hysteresis'", message(job, { dtype = "f16", loss_scale = { histeresis = 1 } }))
    assert.matches("fp16.*did you mean 'f16'", message(job, "fp16"))
  end)
end)

describe("dt.deepspeed", function()
  local function job(config, more)
    local spec = { config = config, model = nn.Linear(10, 5), loss = nn.MSE(), steps = 3,
      data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 640 } }
    for k, v in dt.sorted(more or {}) do spec[k] = v end
    return dt.deepspeed(spec)
  end
  local sgd = { type = "SGD", params = { lr = 0.5 } }
  local function with(more)
    local c = { train_batch_size = 64, optimizer = sgd }
    for k, v in dt.sorted(more) do c[k] = v end
    return c
  end

  it("takes what the configuration says", function()
    local j = job { train_batch_size = 64, gradient_accumulation_steps = 4, gradient_clipping = 0.5, steps_per_print = 7,
      wall_clock_breakdown = true, communication_data_type = "fp32", zero_optimization = { stage = 0, reduce_bucket_size = 262144 },
      optimizer = { type = "AdamW", params = { lr = 1e-4, betas = { 0.8, 0.99 }, eps = 1e-7, weight_decay = 0.1 } },
      fp16 = { enabled = true, initial_scale_power = 12, loss_scale_window = 50, hysteresis = 4, min_loss_scale = 2 } }
    assert.are.same({ global = 64, micro = 16 }, j.batch)
    assert.are.same({ 0.5, 7, true, "f16" }, { j.clip.norm, j.log_every, j.profile, j.precision })
    assert.are.same({ loss_scale = 4096, scale_window = 50, hysteresis = 4, min_scale = 2 }, j.scaling)
    assert.are.same({ 1, 1, "f32" }, { j.parallel.p.gradient.bucket_mb, j.parallel.p.gradient.first_bucket_mb,
      j.parallel.p.gradient.dtype })
    local o = j.optimizer
    assert.are.same({ "AdamW", 1e-4, 0.8, 1e-7, 0.1 }, { o.def.name, o.lr, o.h.betas[1], o.h.eps, o.h.weight_decay })
    assert.are.equal("bf16", job(with { bf16 = { enabled = true } }).precision)
    assert.are.same({ loss_scale = 128, fixed_scale = true }, job(with { fp16 = { enabled = true, loss_scale = 128 } }).scaling)
    assert.are.same({ loss_scale = 65536, scale_window = 1000, hysteresis = 2, min_scale = 1 },
      job(with { fp16 = { enabled = true, loss_scale = 0 } }).scaling)
    assert.are.equal("f32", job(with { fp16 = { enabled = false, loss_scale = 8 } }).precision)
  end)

  it("hands the ZeRO stage on", function()
    if not knows { zero = 1 } then return pending "zero isn't there" end
    for stage = 1, 3 do
      assert.are.equal(stage, job(with { zero_optimization = { stage = stage } }).parallel.p.zero)
    end
    assert.are.equal(1, job(with { zero_optimization = true }).parallel.p.zero)
    local z = { stage = 3, stage3_param_persistence_threshold = 1e5 }
    assert.are.equal(1e5, job(with { zero_optimization = z }).parallel.p.resident)
    assert.matches("stage: is 2, but the script says parallel = { zero = 1 }",
      message(job, with { zero_optimization = { stage = 2 } }, { parallel = { zero = 1 } }))
  end)

  it("has DeepSpeed's optimizers", function()
    local function opt(type, params) return job(with { optimizer = { type = type, params = params } }).optimizer end
    local function is(o, name, lr, decay)
      assert.are.same({ name, lr, decay }, { o.def.name, o.lr, o.h.weight_decay })
    end
    is(opt("Adam", {}), "AdamW", 1e-3, 0)
    is(opt("Adam", { lr = 0.1, adam_w_mode = false, weight_decay = 0.2 }), "Adam", 0.1, 0.2)
    is(opt("AdamW", { adam_w_mode = false, torch_adam = true }), "AdamW", 1e-3, 0.01)
    is(opt("Lamb", { max_coeff = 5 }), "Lamb", 1e-3, 0)
    is(opt("Lion", { betas = { 0.9, 0.98 } }), "Lion", 1e-4, 0)
    is(opt("SGD", { momentum = 0.9, nesterov = true }), "SGD", 1e-3, 0)
    is(opt("RMSprop", {}), "RMSprop", 1e-2, 0)
    is(opt("Adagrad", {}), "Adagrad", 1e-2, 0)
  end)

  it("keeps Lamb's ratio between its bounds", function()
    local w = dt.full({ 5, 10 }, 2)
    local model = nn.Linear(10, 5, { bias = false })
    model:load { weight = w }
    local e = dt.engine(job({ train_batch_size = 64, optimizer = { type = "Lamb", params = { lr = 0.1, max_coeff = 0.5 } } },
      { model = model }))
    e:step()
    -- the first direction is +-1 everywhere, so that the ratio would be 2
    local moved = (e.exec:get("weight") - w):abs()
    assert.is_true(dt.allclose(moved, dt.full({ 5, 10 }, 0.05), { rtol = 1e-4 }))
  end)

  for _, c in ipairs(dofile "tests/data/deepspeed_schedules.lua") do
    it("has the rates of " .. c.type .. (c.params.warmup_type and ", " .. c.params.warmup_type or ""), function()
      local params = {}
      for k, v in dt.sorted(c.params) do params[k] = v end
      local got = optim.rates(job(with { optimizer = { type = "SGD", params = { lr = 0.1 } },
        scheduler = { type = c.type, params = params } }).schedule, 60, 0.1)
      for i = 1, 60 do
        assert.is_true(math.abs(got[i] - c.lr[i]) <= 1e-12, ("update %d: %.15g, DeepSpeed %.15g"):format(i - 1, got[i], c.lr[i]))
      end
    end)
  end

  describe("solves the batch equation", function()
    local function batch(train, micro, steps)
      local b = job({ train_batch_size = train, train_micro_batch_size_per_gpu = micro, gradient_accumulation_steps = steps,
        optimizer = sgd }).batch
      return { b.global, b.micro }
    end
    it("from any two, or one", function()
      assert.are.same({ 64, 64 }, batch(64))
      assert.are.same({ 16, 16 }, batch(nil, 16))
      assert.are.same({ 64, 16 }, batch(64, 16))
      assert.are.same({ 64, 16 }, batch(64, nil, 4))
      assert.are.same({ 64, 16 }, batch(nil, 16, 4))
      assert.are.same({ 64, 16 }, batch(64, 16, 4))
    end)
    it("and shows the numbers and a fix", function()
      assert.matches("train_batch_size 64 = micro batch 16 x accumulation 2 x 1 data%-parallel rank does not hold; "
        .. "train_batch_size 32 or gradient_accumulation_steps 4 or train_micro_batch_size_per_gpu 32 or 2 ranks would do",
        message(batch, 64, 16, 2))
      assert.matches("64 = micro batch 24 x accumulation %? x 1 .* train_batch_size 48 or 72 would do", message(batch, 64, 24))
      assert.matches("64 = micro batch %? x accumulation 3 x 1 .* train_batch_size 63 or 66 would do", message(batch, 64, nil, 3))
      assert.matches("gradient_accumulation_steps alone", message(batch, nil, nil, 3))
    end)
    it("for the ranks of the data axis", function()
      local code, text = support.run("examples/ported/deepspeed.lua", { ranks = 3 })
      assert.are_not.equal(0, code)
      assert.matches("deepspeed.lua:%d+: .*deepspeed.json: train_batch_size 32 = micro batch %? x accumulation 1 x 3 data%-parallel "
        .. "ranks does not hold; train_batch_size 30 or 33 would do", text)
    end)
  end)

  it("reports every steps_per_print steps in a loop of one's own", function()
    local path = support.folder() .. "/ds.json"
    support.write(path, '{ "train_batch_size": 100, "steps_per_print": 4, "optimizer": { "type": "SGD" } }')
    local code, text = support.run("examples/ported/deepspeed.lua --epochs 1 --deepspeed_config " .. path)
    assert.are.equal(0, code, text)
    assert.matches("step=4, skipped=0, lr=0.001, loss=[%d.]+, scale=1, .*step=8, ", text)
  end)

  it("notes what it need not be told", function()
    local j = job(with { zero_optimization = { overlap_comm = false, allgather_bucket_size = 5e8, contiguous_gradients = true } })
    assert.matches("zero_optimization.allgather_bucket_size, zero_optimization.overlap_comm: nothing to tune", j.notes[1])
    assert.is_nil(job(with { zero_optimization = { overlap_comm = true, offload_optimizer = { device = "none" } } }).notes)
  end)

  -- { configuration, pattern of the message }
  local refused = {
    { with { train_batchsize = 1 },
      "ported_spec.lua:%d+: dt.deepspeed: config: train_batchsize: is no key.*did you mean 'train_batch_size'" },
    { with { fp16 = { enabld = true } }, "fp16.enabld: is no key.*did you mean 'enabled'" },
    { with { fp16 = { enabled = "yes" } }, "fp16.enabled wants true or false" },
    { with { fp16 = true }, "fp16: wants an object" },
    { with { fp16 = { 1 } }, "fp16: wants an object" },
    { { train_batch_size = "64", optimizer = sgd }, "train_batch_size wants a whole number" },
    { { train_batch_size = 6.5, optimizer = sgd }, "train_batch_size wants a whole number" },
    { { train_batch_size = 0, optimizer = sgd }, "train_batch_size wants a whole number of at least 1" },
    { { train_batch_size = "auto", optimizer = sgd }, "train_batch_size: \"auto\" is filled in by Hugging Face's" },
    { { optimizer = sgd }, "needs train_batch_size or train_micro_batch_size_per_gpu" },
    { { train_batch_size = 64 }, "needs 'optimizer'" },
    { with { fp16 = { enabled = true }, bf16 = { enabled = true } }, "fp16: is enabled and bf16 too" },
    { with { bf16 = { enabled = true }, bfloat16 = { enabled = true } }, "bfloat16: is given twice, also as bf16" },
    { with { fp16 = { enabled = true, consecutive_hysteresis = true } }, "consecutive_hysteresis: hysteresis is refilled" },
    { with { fp16 = { fp16_master_weights_and_grads = true } }, "master weights are f32" },
    { with { bf16 = { bf16_optimizer_states = true } }, "optimizer states are f32" },
    { with { zero_optimization = { stage = 4 } }, "zero_optimization.stage: is 4; 0, 1, 2 and 3 work" },
    { with { zero_optimization = { offload_optimizer = { device = "cpu" } } }, "offload_optimizer: nothing is offloaded; " },
    { with { zero_optimization = { stage = 0, offload_param = { device = "nvme" } } }, "offload_param: nothing is offloaded; " },
    { with { zero_optimization = { cpu_offload = true } }, "cpu_offload: nothing is offloaded" },
    { with { zero_optimization = { zero_quantized_gradients = true } }, "zero_quantized_gradients: isn't there" },
    { with { zero_optimization = { zero_hpz_partition_size = 8 } }, "zero_hpz_partition_size: isn't there; write 1" },
    { with { zero_optimization = { elastic_checkpoint = true } }, "elastic_checkpoint: checkpoints of any number" },
    { with { gradient_predivide_factor = 2 }, "gradient_predivide_factor: gradients are summed in f32" },
    { with { prescale_gradients = true }, "prescale_gradients: gradients are summed" },
    { with { sparse_gradients = true }, "sparse_gradients: embedding gradients are dense" },
    { with { amp = { enabled = true } }, "amp: Apex isn't there" },
    { with { activation_checkpointing = { partition_activations = true } }, "parallel = { recompute" },
    { with { tensorboard = { enabled = true } }, "tensorboard: .*metrics.jsonl" },
    { with { flops_profiler = { enabled = true } }, "flops_profiler: dtrain plan" },
    { with { elasticity = { enabled = true } }, "elasticity: " },
    { with { aio = { block_size = 1 } }, "aio: nothing is offloaded" },
    { with { data_types = { grad_accum_dtype = "bf16" } }, "data_types: gradients are added in fp32" },
    { with { dump_state = true }, "dump_state: %-%-verbose" },
    { with { dataloader_drop_last = true }, "dataloader_drop_last: each sample counts" },
    { with { communication_data_type = "fp8" }, "communication_data_type: fp8 is unknown; did you mean" },
    { with { optimizer = { type = "Adm" } }, "optimizer.type: Adm is unknown; did you mean 'Adam'" },
    { with { optimizer = { params = {} } }, "optimizer.type: %(missing%) is unknown" },
    { with { optimizer = { type = "OneBitAdam" } }, "OneBitAdam compresses gradients" },
    { with { optimizer = { type = "Muon" } }, "Muon isn't there" },
    { with { optimizer = { type = "Adam", params = { learning_rate = 1 } } }, "optimizer.params.learning_rate: is no key" },
    { with { optimizer = { type = "Adam", params = { max_grad_norm = 1 } } }, "max_grad_norm: .*gradient_clipping" },
    { with { optimizer = { type = "Adam", params = { bias_correction = false } } }, "bias_correction" },
    { with { optimizer = { type = "Adam", params = { lr = -1 } } }, "lr wants a finite number of at least 0" },
    { with { optimizer = { type = "Adam", params = { betas = { 0.9 } } } }, "betas wants 2 numbers" },
    { with { scheduler = { type = "Cosine" } }, "scheduler.type: Cosine is unknown; did you mean 'OneCycle'" },
    { with { scheduler = { type = "WarmupLR", params = { warmup_steps = 3 } } }, "scheduler.params.warmup_steps: is no key" },
    { with { scheduler = { type = "WarmupLR", params = { warmup_type = "sine" } } }, "warmup_type: sine is unknown" },
    { with { scheduler = { type = "WarmupDecayLR" } }, "total_num_steps: is missing; WarmupDecayLR needs it" },
    { with { optimizer = { type = "Adam" }, scheduler = { type = "OneCycle", params = { cycle_min_lr = 0, cycle_max_lr = 1 } } },
      "cycle_momentum: Adam's betas stay" },
    { { train_batch_size = 64, scheduler = { type = "WarmupLR" } }, "scheduler: needs an optimizer" },
  }
  for _, c in ipairs(refused) do
    it("refuses " .. c[2], function() assert.matches(c[2], message(job, c[1])) end)
  end

  it("refuses what is said twice", function()
    assert.matches("optimizer is given in the script and as optimizer in dt.deepspeed: config; leave one out",
      message(job, with {}, { optimizer = optim.SGD {} }))
    assert.matches("clip is given in the script and as gradient_clipping", message(job, with { gradient_clipping = 1 }, { clip = 1 }))
    assert.matches("batch is given", message(job, with {}, { batch = 3 }))
  end)

  it("names file and line of JSON that is none", function()
    local path = support.folder() .. "/ds.json"
    local function config(text)
      support.write(path, text)
      return message(job, path)
    end
    assert.matches("ds.json:3: is not proper JSON at column %d+: .*; mend this line",
      config '{\n  "train_batch_size": 64,\n  "fp16": { enabled: true }\n}')
    assert.matches("ds.json:1: is not proper JSON", config "")
    assert.matches("ds.json:2: is not proper JSON.*duplicate", config '{ "train_batch_size": 1,\n "train_batch_size": 2 }')
    assert.matches("ds.json:1: is not proper JSON", config "{ \"train_batch_size\": 1e999 }")
    assert.matches("is nested more than 64 deep", config(("["):rep(100) .. ("]"):rep(100)))
    assert.matches("wants an object", config "[1]")
    assert.matches("wants an object", config "3")
    assert.matches("ds.json: optimizer.type: Sdg is unknown", config '{ "train_batch_size": 8, "optimizer": { "type": "Sdg" } }')
    assert.matches("nowhere.json", message(job, "nowhere.json"))
    support.write(path, '{ "train_batch_size": 8, "fp16": null, "optimizer": { "type": "SGD", "params": { "lr": 1e-1 } } }')
    local j = job(path)
    assert.are.same({ 8, "f32", 0.1 }, { j.batch.global, j.precision, j.optimizer.lr })
  end)
end)
