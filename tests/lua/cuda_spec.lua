-- device = "cuda" on the emulator of tests/cuda_emu, which is no GPU: small models train as on the CPU, by the losses and the
-- gradients' norms of each step, alone and on 2 ranks under the strategies; and what a host without a GPU says. Kernels one by
-- one: tests/c/test_cuda.c.
local support = require "support"

local dir = support.folder()
support.write(dir .. "/job.lua", [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local args = dt.args { model = "mlp", precision = "f32" }
local models = {
  mlp = function()
    return nn.Sequential { nn.Linear(10, 33), nn.GELU(), nn.Linear(33, 7) },
      data.synthetic { inputs = { 10 }, classes = 7, samples = 96 }
  end,
  cnn = function()
    return nn.Sequential { nn.Conv2d(2, 5, 3, { bias = false }), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
      nn.Dropout(0.2), nn.Linear(125, 7) },
      data.synthetic { inputs = { 2, 12, 12 }, classes = 7, samples = 96 }
  end,
  gpt = function()
    return nn.GPT { vocab = 37, layers = 2, heads = 4, kv_heads = 2, width = 32, context = 20, positions = "rotary", dropout = 0.1 },
      data.synthetic { tokens = 37, context = 20, samples = 96 }
  end,
}
local model, set = models[args.model]()
return dt.job {
  model = model, loss = nn.CrossEntropy(), data = set:split { train = 72, valid = 24 }, batch = { global = 8, micro = 2 }, steps = 4,
  eval = { every = 2 }, optimizer = optim.AdamW { lr = 1e-2 }, clip = 1, precision = args.precision,
}
]])

local function losses(device, words, ranks)
  local out = support.folder() .. "/run"
  local code, text = support.run(("%s/job.lua %s --threads 1 --device %s --out %s"):format(dir, words, device, out),
    { ranks = ranks > 1 and ranks, seconds = 120, env = "DT_CUDA=emulator" })
  assert.are.equal(0, code, text)
  if device == "cuda" then assert.is_truthy(text:find("on cuda emulator", 1, true), text) end
  local path = out .. "/metrics.jsonl"
  return { loss = support.metric(path, "loss"), norm = support.metric(path, "norm"), eval = support.metric(path, "eval_loss") }
end

local function there() return io.open(support.build .. "/libdtrain_cuda_emu.so") ~= nil end

-- words, ranks, tolerance: that of f32 sums in another order, and of bf16's 8 bits
local cases = {
  { "--model mlp", 1, 2e-5 }, { "--model cnn", 1, 2e-5 }, { "--model gpt", 1, 5e-5 }, { "--model gpt --precision bf16", 1, 2e-2 },
  { "--model mlp --precision f16", 1, 1e-2 }, { "--model gpt --parallel recompute=full", 1, 5e-5 },
  { "--model mlp", 2, 2e-5 }, { "--model cnn", 2, 2e-5 }, { "--model gpt", 2, 5e-5 }, { "--model gpt --parallel zero=1", 2, 5e-5 },
  { "--model gpt --parallel zero=2", 2, 5e-5 }, { "--model gpt --parallel zero=3", 2, 5e-5 },
  { "--model gpt --parallel tensor=2,sequence=true", 2, 5e-5 }, { "--model gpt --parallel pipeline=2", 2, 5e-5 },
}

describe("device = cuda, on the emulator,", function()
  for _, c in ipairs(cases) do
    it(("trains %s on %d rank%s as the CPU does"):format(c[1], c[2], c[2] == 1 and "" or "s"), function()
      if not there() then return pending "the emulator is not built; make cuda-emu" end
      local want, got = losses("cpu", c[1], c[2]), losses("cuda", c[1], c[2])
      assert.are.equal(4, #want.loss)
      for _, key in ipairs { "loss", "norm", "eval" } do
        assert.are.equal(#want[key], #got[key], key)
        for i, w in ipairs(want[key]) do
          assert.is_true(math.abs(got[key][i] - w) <= c[3] * (1 + math.abs(w)),
            ("%s %d is %.9g, the CPU has %.9g"):format(key, i, got[key][i], w))
        end
      end
    end)
  end
  it("gives each rank of a host a GPU of its own", function()
    if not there() then return pending "the emulator is not built; make cuda-emu" end
    local code, text = support.run(dir .. "/job.lua --device cuda", { ranks = 2, env = "DT_CUDA=emulator DT_EMU_DEVICES=1" })
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find "2 ranks on this host, which has 1 GPU; start at most one rank for each GPU", text)
  end)
  it("finds a label that is no class, and says the line and the label", function()
    if not there() then return pending "the emulator is not built; make cuda-emu" end
    local script = support.folder() .. "/labels.lua"
    support.write(script, [[
local dt = require "dtrain"
return dt.job { model = dt.nn.Linear(3, 2), loss = dt.nn.CrossEntropy(), batch = 4, steps = 2, optimizer = dt.optim.SGD { lr = 0.1 },
  data = dt.data.tensors { inputs = dt.zeros { 4, 3 }, targets = dt.tensor({ 0, 1, 7, 1 }, "i64") } }
]])
    local _, want = support.run(script)
    local code, text = support.run(script .. " --device cuda", { env = "DT_CUDA=emulator" })
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find("label 7 is outside 0 to 1", 1, true), text)
    assert.are.equal(want:match "[^\n]*label 7[^\n]*", text:match "[^\n]*label 7[^\n]*")
  end)
  it("says before the first step that memory does not suffice", function()
    if not there() then return pending "the emulator is not built; make cuda-emu" end
    local code, text = support.run(dir .. "/job.lua --model gpt --device cuda", { env = "DT_CUDA=emulator DT_EMU_MEMORY=100000" })
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find "the plan needs 0.00 GiB on the GPU" and not text:find "step 1", text)
  end)
end)

describe("without a GPU", function()
  local env = "DT_CUDA=emulator DT_EMU_DEVICES=0"
  it("cuda is an error that says what is missing, auto is the CPU", function()
    if not there() then return pending "the emulator is not built; make cuda-emu" end
    local code, text = support.run(dir .. "/job.lua --device cuda", { env = env })
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find "no NVIDIA GPU is visible", text)
    code, text = support.run(dir .. "/job.lua --device auto", { env = env })
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find "no GPU: no NVIDIA GPU is visible" and text:find "step 4/4", text)
    code, text = support.run("devices", { env = env })
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find "^cpu: " and text:find "cuda: no NVIDIA GPU is visible", text)
  end)
  it("a build without the plug-in says how to make it", function()
    local code, text = support.run(dir .. "/job.lua --device cuda", { env = "DT_PLUGIN_DIR=" .. support.folder() .. " DT_CUDA=" })
    assert.are_not.equal(0, code)
    assert.is_truthy(text:find "device = \"cuda\": ", text)
  end)
end)
