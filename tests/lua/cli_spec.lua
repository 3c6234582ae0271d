-- The command line as a user meets it: verbs, options, what is printed where, what is written and what is not.
local support = require "support"

local function ok(words, options)
  local code, text, seconds = support.run(words, options)
  assert.are.equal(0, code, text)
  return text, seconds
end

describe("dtrain", function()
  it("without words, with help and with --help lists verbs and options", function()
    for _, words in ipairs { "", "help", "--help", "-h" } do
      local text = ok(words)
      for _, word in ipairs { "usage: dtrain", "plan", "explain", "repl", "--steps", "--seed", "--resume", "--out" } do
        assert.is_truthy(text:find(word, 1, true), word)
      end
    end
  end)
  it("--version says which kernels run", function()
    local text = ok "--version"
    assert.is_truthy(text:find "^dtrain %d+%.%d+")
    assert.is_truthy(text:find "kernels: %w+")
  end)
  it("runs with every instruction set that this machine has", function()
    for _, isa in ipairs { "portable", "avx2", "avx512" } do
      local code, text = support.run("examples/linear.lua --steps 2", { env = "DT_ISA=" .. isa })
      assert.is_true(code == 0 or text:find(isa, 1, true) ~= nil, text)
      if isa == "portable" then assert.are.equal(0, code, text) end
    end
  end)
  it("with a script's name and --help lists the script's options and its own", function()
    local text = ok "examples/linear.lua --help"
    assert.is_truthy(text:find "%-%-epochs N +.*default 10")
    assert.is_truthy(text:find "%-%-steps N")
  end)
  it("takes options before and after the script", function()
    local a = ok "--steps 3 --seed 4 examples/linear.lua"
    local b = ok "examples/linear.lua --steps=3 --seed 4"
    local c = ok "run --seed 4 examples/linear.lua --steps 3"
    local loss = a:match "step 3/3  loss ([%d.]+)"
    assert.is_truthy(loss)
    assert.are.equal(loss, b:match "step 3/3  loss ([%d.]+)")
    assert.are.equal(loss, c:match "step 3/3  loss ([%d.]+)")
  end)
  it("--quiet prints nothing", function() assert.are.equal("", ok "examples/linear.lua --steps 3 --quiet") end)
  it("--verbose prints the model, the memory and every step", function()
    local text = ok "examples/linear.lua --steps 7 --verbose"
    for _, word in ipairs { "Linear", "parameters", "total", "step 2/7", "step 3/7", "step 6/7" } do
      assert.is_truthy(text:find(word, 1, true), word)
    end
  end)
  it("prints plain lines without escapes when not on a terminal", function()
    assert.is_nil(ok("examples/linear.lua --steps 30"):find "[\27\r]")
  end)
  it("starts and makes a step in half a second", function()
    local _, seconds = ok "examples/linear.lua --steps 1 --quiet"
    assert.is_true(seconds < 0.5, seconds)
  end)
end)

describe("--out", function()
  it("holds metrics.jsonl with one object a line", function()
    local dir = support.folder()
    ok(("examples/linear.lua --steps 20 --out %s/run --quiet"):format(dir))
    local n = 0
    for line in io.lines(dir .. "/run/metrics.jsonl") do
      n = n + 1
      assert.is_truthy(line:find "^{.*}$")
      for _, key in ipairs { "step", "epoch", "loss", "lr", "grad_norm", "samples_per_second", "step_ms", "seconds" } do
        assert.is_truthy(line:match('"' .. key .. '":[%d.e+-]+'), key .. " in " .. line)
      end
    end
    assert.are.equal(20, n)
    assert.are.equal(20, support.metric(dir .. "/run/metrics.jsonl", "step")[20])
  end)
  it("left out, nothing is written", function()
    local dir = support.folder()
    local example = support.root .. "/examples/linear.lua"
    ok(example .. " --steps 3", { dir = dir })
    assert.are.equal("", support.list(dir))
  end)
end)

describe("plan and explain", function()
  it("need no training and say what each rank allocates", function()
    local text = ok "plan examples/own_model.lua --ranks 64"
    for _, word in ipairs { "parameters", "gradients", "optimizer states", "activations", "temporaries",
      "communication buffers", "total" } do
      assert.is_truthy(text:find(word, 1, true), word)
    end
  end)
  it("for a run, the total is what the run allocates", function()
    -- the run itself compares its allocation with the plan's; --verbose prints that figure
    local plan = ok("plan examples/own_model.lua"):match "\ntotal +([%d,]+)"
    local run = ok("examples/own_model.lua --steps 1 --verbose"):match "\ntotal +([%d,]+)"
    assert.is_truthy(plan)
    assert.are.equal(plan, run)
  end)
  it("name each collective with its bytes and reason", function()
    local text = ok "explain examples/own_model.lua --ranks 4"
    assert.is_truthy(text:find "all_reduce.*%d+ bytes")
    assert.is_truthy(ok("explain examples/linear.lua"):find "1 rank: no collectives")
  end)
end)

describe("the standard library", function()
  it("comes from a folder with DTRAIN_STDLIB", function()
    local dir = support.folder()
    os.execute(("cp -R stdlib %s/lib"):format(dir))
    local text = support.read "stdlib/dtrain.lua"
    support.write(dir .. "/lib/dtrain.lua", 'print "from a folder"\n' .. text)
    assert.is_truthy(ok("examples/linear.lua --steps 1", { env = "DTRAIN_STDLIB=" .. dir .. "/lib" }):find "from a folder")
  end)
  it("is there for a stock lua5.4", function()
    local dir = support.folder()
    support.write(dir .. "/a.lua", 'local dt = require "dtrain" print(dt.ones({ 2, 3 }):sum():item(), dt.size())')
    local code, text = support.sh("lua5.4 " .. dir .. "/a.lua", { env = ("LUA_CPATH='%s/?.so'"):format(support.build) })
    assert.are.equal(0, code, text)
    assert.are.equal("6.0\t1\n", text)
  end)
  it("tells a stock lua5.4 of a job that nobody trained", function()
    local job = 'dt.job { model = dt.nn.Linear(2, 2), loss = dt.nn.MSE(), batch = 4, optimizer = dt.optim.SGD { lr = 1 }, steps = 1,'
      .. ' data = dt.data.synthetic { inputs = { 2 }, targets = { 2 }, samples = 4 } }'
    for _, c in ipairs { { "return " .. job, 1 }, { "local job = " .. job, 1 },
      { "local e = dt.engine(" .. job .. ") e:step()", 0 } } do
      local dir = support.folder()
      support.write(dir .. "/a.lua", 'local dt = require "dtrain"\n' .. c[1])
      local code, text = support.sh("lua5.4 a.lua", { env = ("LUA_CPATH='%s/?.so'"):format(support.build), dir = dir })
      assert.are.equal(c[2], code, text)
      assert.are.equal(c[2] == 1, text:find "a.lua.-: this job was never trained; start the script by dtrain a.lua" ~= nil, text)
    end
  end)
end)

describe("dtrain repl", function()
  local function session(lines)
    local code, text = support.sh(("sh -c %s"):format(support.quote(("printf '%s' | %s repl"):format(lines, support.dtrain))))
    assert.are.equal(0, code, text)
    return text
  end
  it("prints expressions, keeps globals, goes on after an error", function()
    assert.are.equal("3\n", session "1 + 2\\n")
    assert.are.equal("21\n", session "x = 20\\nx + 1\\n")
    local text = session "dt.ones{2} + dt.ones{3}\\n7\\n"
    assert.is_truthy(text:find "broadcast.*\n7\n$")
  end)
  it("takes a statement over several lines", function()
    assert.are.equal("6\n", session "for i = 1, 3 do\\n  s = (s or 0) + i\\nend\\ns\\n")
  end)
end)

describe("the README", function()
  it("has a script that runs, and output of it that is not made up", function()
    local readme = support.read "README.md"
    local script = readme:match "```lua\n(.-)```"
    if not support.read "/usr/share/datasets/fashion-mnist/train-labels-idx1-ubyte.gz" then
      pending "Debian's dataset-fashion-mnist is not installed"
    end
    local dir = support.folder()
    support.write(dir .. "/train.lua", script)
    local text = ok(dir .. "/train.lua --epochs 3 --threads 1", { ranks = 2, seconds = 300 })
    assert.are.equal(readme:match "\n(%d[%d,]* parameters, [^\n]*)", text:match "(%d[%d,]* parameters, [^\n]*)")
    local said = tonumber(readme:match "accuracy ([%d.]+)")
    assert.is_true(math.abs(said - tonumber(text:match "accuracy ([%d.]+)")) < 0.01)
  end)
end)

describe("install", function()
  it("puts a program that works where PREFIX says", function()
    local dir = support.folder()
    local line = ("env -u MAKEFLAGS -u MAKELEVEL make -s install B=%s PREFIX=%s"):format(support.build, dir)
    local code, text = support.sh(line, { seconds = 300 })
    assert.are.equal(0, code, text)
    assert.is_truthy(support.list(dir):find "bin/dtrain")
    code, text = support.sh(dir .. "/bin/dtrain examples/linear.lua --steps 2", { ranks = 2 })
    assert.are.equal(0, code, text)
    assert.is_truthy(text:find "2 ranks")
  end)
end)
