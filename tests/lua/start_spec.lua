-- How a script is started, what it may have done before its job, and how a run ends: options act whatever came before, looking at a
-- model changes nothing, and what did not happen is never exit code 0.
local support = require "support"

local head = [[
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
]]
-- A script with a loop of its own; before: text in front of the job; of: more of the job; body: of the loop.
local function loop(before, of, body)
  return head .. ([[
local model = nn.Sequential { nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5) }
%s
local job = dt.job { model = model, loss = nn.MSE(), batch = 32, optimizer = optim.SGD { lr = 0.01 },
  data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 100 }, %s }
local engine = dt.engine(job)
for step, batch in engine:batches() do
  local m = engine:step(batch)
  if step == engine.steps then print(("%%.17g"):format(m.loss)) end
  %s
end
]]):format(before or "", of or "steps = 5", body or "")
end

local function run(text, words, options)
  options = options or {}
  options.dir = options.dir or support.folder()
  support.write(options.dir .. "/a.lua", text)
  return support.run("a.lua " .. (words or ""), options)
end

describe("options", function()
  local looks = { "print(model, model:state())", "print(model(dt.ones { 2, 10 }))", "model:train() model(dt.ones { 2, 10 })",
    "dt.value_and_grad(function(m, x) return m(x):sum() end, model, dt.ones { 3, 10 })",
    "for _, w in model:named_parameters() do print(w:sum():item()) end" }
  for seed = 1, 2 do
    it(("decide initial values, whatever was looked at before: --seed %d"):format(seed), function()
      local words = "--threads 1 --seed " .. seed
      local _, want = run(loop(), words)
      for _, look in ipairs(looks) do
        local code, text = run(loop(look), words)
        assert.are.equal(0, code, text)
        assert.are.equal(want, text:match "[^\n]*\n$", look)
      end
    end)
  end
  it("let a reader see what the run begins with", function()
    local _, text = run(head .. [[
local model = nn.Sequential { nn.Linear(10, 8), nn.Residual(nn.Linear(8, 8)) }
local all = model:state()
local copy = {}
for name, w in dt.sorted(all) do copy[name] = dt.tensor(w:totable()) end
local engine = dt.engine(dt.job { model = model, loss = nn.MSE(), batch = 32, steps = 1, optimizer = optim.SGD { lr = 0.1 },
  data = data.synthetic { inputs = { 10 }, targets = { 8 } } })
for name, w in dt.sorted(engine:state()) do assert(dt.allclose(w, copy[name], { rtol = 0, atol = 0 }), name) end
print "equal"]], "--seed 7")
    assert.are.equal("equal\n", text)
  end)
  it("say so where a reader saw another value than the run's", function()
    local code, text = run(loop("local _ = model[1].weight dt.manual_seed(3) _ = model[3].weight"))
    assert.are.equal(0, code, text)
    assert.matches("note: 2.weight was read before the job and begins with another value", text)
    assert.is_nil(text:find "0.weight was read")
  end)
  it("keep a value that was written", function()
    local written = "for name, w in dt.sorted(model:state()) do w:copy_(%s) end"
    local _, plain = run(loop(), "--threads 1")
    local _, other = run(loop(written:format "dt.zeros(w:shape())"), "--threads 1")
    local _, loaded = run(loop "local s = {} for k, w in dt.sorted(model:state()) do s[k] = w * 0 end model:load(s)", "--threads 1")
    assert.are_not.equal(plain, other)
    assert.are.equal(other, loaded)
  end)
  it("change threads after tensors were computed", function()
    for n = 1, 2 do
      local code, text = run(head .. [[
local x = dt.ones { 64, 64 }
local before = (x:matmul(x)):sum():item()
local engine = dt.engine(dt.job { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 32, optimizer = optim.SGD { lr = 0.01 },
  data = data.synthetic { inputs = { 10 }, targets = { 5 } }, steps = 1 })
print(require "dtrain.core".threads(), before == (x:matmul(x)):sum():item())]], "--threads " .. n)
      assert.are.equal(0, code, text)
      assert.are.equal(n .. "\ttrue\n", text)
    end
  end)
end)

describe("a schedule", function()
  it("of a hundred million steps takes no memory", function()
    local code, text = run(loop(nil, "schedule = optim.cosine {}, steps = 100000000",
      "if step == 3 then print(('%.12g'):format(m.lr)) break end"), "", { env = "sh -c 'ulimit -v 3000000; exec \"$@\"' sh" })
    assert.are.equal(0, code, text)
    assert.matches("^0.01\n", text)
  end)
  it("is asked at the step that it is for, and at a few steps before the run", function()
    local code, text = run(loop("local seen = {}",
      "steps = 5, schedule = function(step) seen[#seen + 1] = step return 1 / (1 + step) end",
      "if step == 5 then print(table.concat(seen, ' '), ('%.9g'):format(m.lr)) end"))
    assert.are.equal(0, code, text)
    assert.matches("0 1 2 3 4 0 1 3 0 1 2 3 4\t0.002\n", text) -- tried, compared between ranks and runs, asked
  end)
end)

describe("the progress line", function()
  it("shows no more than the whole peak", function()
    local code, text = support.run(support.root .. "/examples/fashion_cnn.lua --steps 12 --verbose", { dir = support.root })
    assert.are.equal(0, code, text)
    local n = 0
    for share in text:gmatch "(%d+) %% of peak" do
      n = n + 1
      assert.is_true(tonumber(share) <= 100, text)
    end
    assert.are.equal(12, n)
  end)
end)

describe("a script", function()
  it("finds the files beside it from any folder", function()
    local dir = support.folder()
    os.execute("mkdir -p " .. dir .. "/deep/parts")
    support.write(dir .. "/deep/helper.lua", "return { n = 7 }")
    support.write(dir .. "/deep/parts/init.lua", "return require 'helper'.n + 1")
    support.write(dir .. "/deep/main.lua", "print(require 'helper'.n, (require 'parts'))")
    for _, start in ipairs { { dir, "deep/main.lua" }, { dir .. "/deep", "main.lua" }, { "/", dir .. "/deep/main.lua" } } do
      local code, text = support.run(start[2], { dir = start[1] })
      assert.are.equal(0, code, text)
      assert.are.equal("7\t8\n", text)
    end
  end)
  it("may begin with a byte-order mark, also before #!", function()
    for _, first in ipairs { "", "#!/usr/bin/env dtrain\n" } do
      local code, text = run("\xef\xbb\xbf" .. first .. "print(1)")
      assert.are.equal(0, code, text)
      assert.are.equal("1\n", text)
    end
  end)
  it("walks a tensor with ipairs", function()
    local code, text = run(head .. "for i, x in ipairs(dt.tensor { 5, 6 }) do print(i, x:item()) end")
    assert.are.equal(0, code, text)
    assert.are.equal("1\t5\n2\t6\n", text)
  end)
  it("sets globals as it likes, and asks for one with rawget", function()
    local code, text = run("x = nil y = 3 print(x, y, rawget(_G, 'z'))")
    assert.are.equal(0, code, text)
    assert.are.equal("nil\t3\tnil\n", text)
  end)
  it("may require a library from elsewhere that looks for globals", function()
    local lib = support.folder()
    support.write(lib .. "/other.lua", "return { unpack = unpack or table.unpack }")
    local code, text = run("print(require 'other'.unpack == table.unpack)", "", { env = "LUA_PATH='" .. lib .. "/?.lua;;'" })
    assert.are.equal(0, code, text)
    assert.are.equal("true\n", text)
  end)
end)

describe("what a trace freezes", function()
  local M = [[
local M = nn.module "M"
function M:init()
  self.l = nn.Linear(10, 5)
  self.scale = dt.ones { 5 }
  self.more = { a = { dt.ones { 5 } } }
end
function M:forward(x) return self.l(x) * self.scale end
model = M()]]
  it("is told of: tensors in fields, by their lines", function()
    local code, text = run(loop(M))
    assert.are.equal(0, code, text)
    assert.matches("note: a.lua:7: scale is a tensor, and so a constant", text)
    assert.matches("note: a.lua:8: more.a.0 is a tensor", text)
    code, text = run(loop(M), "--quiet")
    assert.are.equal(0, code, text)
    assert.is_nil(text:find "note")
  end)
  it("does not hold math.random outside of a forward", function()
    local code, text = run(loop("math.randomseed(1) print(math.random(6) <= 6)", nil, "assert(math.random() < 1)"))
    assert.are.equal(0, code, text)
  end)
end)

describe("a batch of fewer samples than ranks", function()
  local job = loop(nil, "batch = 2, steps = 2"):gsub("batch = 32, ", "")
  it("is told of at the start", function()
    local _, text = run(job, "", { ranks = 4 })
    assert.matches("note: batch 2 has a sample for 2 of 4 replicas", text)
  end)
  it("is told of by plan", function()
    local dir = support.folder()
    support.write(dir .. "/a.lua", job)
    local code, text = support.run("plan a.lua --ranks 8", { dir = dir })
    assert.are.equal(0, code, text)
    assert.matches("1 microbatch of 1 on those that have samples\nnote: batch 2 has a sample for 2 of 8 replicas", text)
  end)
end)

describe("engine:resume", function()
  local script = loop(nil, nil, "if step == 3 then engine:save 'runs/best' end") .. [[
local want = model:state()
for _, folder in ipairs { "runs/best", "runs/best/step-00000003" } do
  local again = dt.engine(dt.job { model = nn.Sequential { nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 5) }, loss = nn.MSE(), batch = 32,
    optimizer = optim.SGD { lr = 0.01 }, data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 100 }, steps = 5 })
  assert(again:resume(folder) == 3)
  for step, batch in again:batches() do
    assert(batch.step > 3)
    again:step(batch)
  end
  print(again.step_number)
end]]
  it("finds what engine:save has made, by either folder, and goes on behind it", function()
    local code, text = run(script)
    assert.are.equal(0, code, text)
    assert.matches("5\n5\n$", text)
  end)
  it("is what --resume with a run's folder does, too", function()
    local dir = support.folder()
    local job = loop(nil, nil, ""):gsub("local engine.*", "return job")
    local code, text = run(job, "--out out", { dir = dir })
    assert.are.equal(0, code, text)
    code, text = run(job, "--resume out --steps 7", { dir = dir })
    assert.are.equal(0, code, text)
    assert.matches("from step 5", text)
  end)
end)

describe("a run that is asked to stop", function()
  local function stopped(signal, text)
    local dir = support.folder()
    support.write(dir .. "/a.lua", text)
    local line = ("timeout --preserve-status -s %s 1 %s a.lua; echo code $?"):format(signal, support.dtrain)
    return support.sh("sh -c " .. support.quote(line), { dir = dir, seconds = 20 })
  end
  it("ends with 75 in a loop of its own, too", function()
    local code, text = run(loop(nil, "steps = 100000", "if step == 2 then os.execute 'kill -TERM $PPID' end"))
    assert.are.equal(75, code, text)
  end)
  it("ends with 0 when the request comes in the last step", function()
    local code, text = run(loop(nil, nil, "if step == 5 then os.execute 'kill -TERM $PPID' end"))
    assert.are.equal(0, code, text)
  end)
  for _, signal in ipairs { "TERM", "INT", "USR1" } do
    it(("by SIG%s before it trains ends at once"):format(signal), function()
      local _, text, seconds = stopped(signal, "while true do end")
      assert.matches("ended by SIG" .. signal .. " before training", text)
      assert.is_true(seconds < 3, text)
    end)
  end
  for _, c in ipairs { { "that never comes to the next step", "while true do end" },
    { "of slow operations", "local x = dt.ones { 400, 400 } while true do x = x:matmul(x) end" } } do
    it("is ended in a loop " .. c[1], function()
      local code, text, seconds = run(loop(nil, nil, "if step == 2 then os.execute 'kill -TERM $PPID' " .. c[2] .. " end"))
      assert.matches("a.lua:%d+: asked to stop by SIGTERM, but this code has not come to the next step for 5 s", text)
      assert.are.equal(1, code, text)
      assert.is_true(seconds < 12, text)
    end)
  end
  local kill = "os.execute 'kill -TERM $PPID'"
  for _, c in ipairs { { "that catches errors", kill .. " while true do pcall(function() while true do end end) end" },
    { "in a coroutine", "coroutine.wrap(function() " .. kill .. " while true do end end)()" } } do
    it("is ended in a loop " .. c[1], function()
      local code, text, seconds = run(loop(nil, nil, "if step == 2 then " .. c[2] .. " end"))
      assert.matches("asked to stop, but the script has not come to its next step for 8 s", text)
      assert.are.equal(1, code, text)
      assert.is_true(seconds < 15, text)
    end)
  end
  it("is left alone where a step, an evaluation or what comes behind the last step takes long", function()
    local slow = "require 'dtrain.core'.sleep(0.4) return dt.ones { 10 }, dt.ones { 5 }"
    local code, text = run(loop(nil, ("steps = 3, data = data.from(function() %s end, 40)"):format(slow),
      "if step == 1 then os.execute 'kill -TERM $PPID' end"):gsub("data = data.synthetic[^\n]*100 },", "") .. "\nprint 'behind'")
    assert.are.equal(75, code, text)
    code, text = run(loop(nil, nil, "if step == 5 then os.execute 'kill -TERM $PPID' end")
      .. "\nfor _ = 1, 100 do require 'dtrain.core'.sleep(0.1) end print 'behind'")
    assert.are.equal(0, code, text)
    assert.matches("behind\n$", text)
  end)
end)

describe("a run whose data file fails", function()
  it("keeps the last step's state, and goes on when the file is back", function()
    local dir = support.folder()
    support.write(dir .. "/big", ("some text "):rep(30000))
    local job = head .. [[
local n = 0
local cut = function(step)
  n = n + 1
  if os.getenv "CUT" and n == 100 then os.execute "cp big kept; truncate -s 100 big" end
  return 1
end
return dt.job { model = nn.GPT { vocab = 256, layers = 1, heads = 1, width = 8, context = 8 }, loss = nn.CrossEntropy(), batch = 4,
  data = data.text { file = "big", context = 8 }, optimizer = optim.SGD { lr = 0.1 }, schedule = cut, steps = 60,
  checkpoint = { dir = "ck" } }]]
    local code, text = run(job, "", { dir = dir, env = "CUT=1" })
    assert.are.equal(1, code, text)
    assert.matches("big: the file has become shorter .-%(step %d+ is saved below ck; %-%-resume auto goes on from it%)", text)
    os.execute(("mv %s/kept %s/big"):format(dir, dir))
    code, text = run(job, "--resume auto", { dir = dir })
    assert.are.equal(0, code, text)
    assert.matches("step 60/60", text)
  end)
end)

describe("a file that becomes shorter while it is read", function()
  local sets = {
    text = [[data.text { file = "big", context = 8 }]],
    cifar10 = [[data.cifar10 { files = { "big" }, transforms = { data.flatten() } }]],
    tensors = [[data.tensors { inputs = dt.load "x.npy" }]],
    npy = [[data.npy { inputs = "x.npy" }]],
  }
  for _, kind in ipairs { "text", "cifar10", "tensors", "npy" } do
    for _, left in ipairs { 0, 100, 5000 } do
      it(("of data.%s, %d bytes left, is an error that names it"):format(kind, left), function()
        local dir = support.folder()
        os.execute("head -c 307300 /dev/zero > " .. dir .. "/big")
        local head_ = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000, 64), }"
        support.write(dir .. "/x.npy", "\x93NUMPY\1\0" .. ("<I2"):pack(#head_) .. head_ .. ("\0"):rep(256000))
        local code, text = run(head .. ([[
local M = nn.module "M"
function M:init() self.w = nn.parameter { 1 } end
function M:forward(x) return x:to "f32" * self.w end
local engine = dt.engine(dt.job { model = M(), loss = function(y) return y:mean() end, batch = 32, optimizer = optim.SGD { lr = 0 },
  data = %s, steps = 100000 })
for step, batch in engine:batches() do
  engine:step(batch)
  if step == 3 then os.execute "truncate -s %d big x.npy" end
end]]):format(sets[kind], left), "", { dir = dir })
        assert.are.equal(1, code, text)
        assert.matches("the file has become shorter while it was in use; put the whole file back", text)
        assert.matches((sets[kind]:find "big" and "big" or "x.npy") .. ": the file has", text)
      end)
    end
  end
end)
