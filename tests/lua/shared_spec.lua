-- Two engines on one model have one set of parameters: against formulas written out here, and against one process on ranks.
local dt = require "dtrain"
local support = require "support"
local nn, optim, data = dt.nn, dt.optim, dt.data

local dir = support.folder()
local function sigmoid(x) return 1 / (1 + math.exp(-x)) end
local noise, real = { 0.5, -1, 2, 1.5 }, { 1, 2, 1.5, 0.5 }

local Game = nn.module "Game"
function Game:init()
  self.maker = nn.Linear(1, 1, { bias = false })
  self.judge = nn.Linear(1, 1, { bias = false })
end
function Game:forward(z) return self.judge(self.maker(z)) end

local function column(list)
  local rows = {}
  for i, v in ipairs(list) do rows[i] = { v } end
  return dt.tensor(rows)
end
local function make(options)
  local game = Game()
  game:load { ["maker.weight"] = dt.tensor { { 0.3 } }, ["judge.weight"] = dt.tensor { { -0.2 } } }
  local set = data.tensors { inputs = column(noise), targets = column(real) }
  local function engine(freeze, loss, lr, more)
    local job = { model = game, loss = loss, freeze = freeze, data = set, batch = 4, steps = 20, optimizer = optim.SGD { lr = lr } }
    for k, v in pairs(more or {}) do job[k] = v end
    return dt.engine(dt.job(job))
  end
  local function judged(fake, x) return dt.softplus(-game.judge(x)):mean() + dt.softplus(fake):mean() end
  local function fooled(fake) return dt.softplus(-fake):mean() end
  return game, engine(game.maker, judged, 0.4, options), engine(game.judge, fooled, 0.7, options)
end
-- The same by hand: after so many rounds the maker's and the judge's weight.
local function by_hand(rounds)
  local g, d = 0.3, -0.2
  for _ = 1, rounds do
    local s = 0
    for i, z in ipairs(noise) do
      s = s - sigmoid(-d * real[i]) * real[i] + sigmoid(d * g * z) * g * z
    end
    d = d - 0.4 * s / #noise
    s = 0
    for _, z in ipairs(noise) do s = s - sigmoid(-d * g * z) * d * z end
    g = g - 0.7 * s / #noise
  end
  return g, d
end
local function weights(state) return state["maker.weight"]:item(), state["judge.weight"]:item() end
local function near(a, b, what) assert.is_true(math.abs(a - b) < 2e-6, ("%s: %.9g, want %.9g"):format(what, a, b)) end

local function fails(f, text)
  local ok, e = pcall(f)
  assert.is_false(ok)
  assert.is_truthy(tostring(e):find(text, 1, true), tostring(e))
end

describe("two engines on one model", function()
  for _, reads in ipairs { false, true } do
    it("step in turn on one set of parameters" .. (reads and ", read in between" or ""), function()
      local game, judge, maker = make()
      for round = 1, 6 do
        judge:step()
        if reads then near(select(2, weights(maker:state())), select(2, weights(judge:state())), "judge") end
        maker:step()
        if reads then near(weights(game:state()), by_hand(round), "maker") end
      end
      local g, d = by_hand(6)
      for _, state in ipairs { judge:state(), maker:state(), game:state() } do
        local have_g, have_d = weights(state)
        near(have_g, g, "maker")
        near(have_d, d, "judge")
      end
    end)
  end
  it("may train the same parameters with other losses", function()
    local line = nn.Linear(1, 1, { bias = false })
    line:load { weight = dt.full({ 1, 1 }, 2.0) }
    local set = data.tensors { inputs = dt.ones { 2, 1 }, targets = dt.zeros { 2, 1 } }
    local function engine(loss, lr)
      return dt.engine(dt.job { model = line, loss = loss, data = set, batch = 2, steps = 9, optimizer = optim.SGD { lr = lr } })
    end
    local a = engine(function(y) return (y * y):mean() end, 0.1)
    a:step() -- w = 2 - 0.1 * 2 * 2
    local b = engine(function(y) return y:mean() end, 0.5) -- begins where the first one is, though nobody has read it
    b:step() -- - 0.5
    a:step() -- times 0.8
    near(b:state().weight:item(), (1.6 - 0.5) * 0.8, "weight")
    near(a:state().weight:item(), (1.6 - 0.5) * 0.8, "weight")
    line:load { weight = dt.full({ 1, 1 }, 5.0) }
    b:step()
    near(a:state().weight:item(), 4.5, "weight")
  end)
  it("share buffers", function()
    local norm = nn.BatchNorm2d(2)
    local set = data.tensors { inputs = dt.tensor({ 1.0, 2.0, 3.0, 6.0 }):reshape { 2, 2, 1, 1 }, targets = dt.zeros { 2, 2, 1, 1 } }
    local function engine()
      return dt.engine(dt.job { model = norm, loss = nn.MSE(), data = set, batch = 2, steps = 9, optimizer = optim.SGD { lr = 0 } })
    end
    local a, b = engine(), engine()
    a:step()
    b:step()
    near(a:state().running_mean:totable()[2], 0.9 * 0.1 * 4 + 0.1 * 4, "running mean") -- of 2 and 6, twice, momentum 0.1
  end)
  it("save what there is and resume from it", function()
    local game, judge, maker = make { checkpoint = { dir = dir .. "/game" } }
    judge:step()
    maker:step()
    judge:save(dir .. "/judge")
    local g, d = weights(game:state())
    judge:step()
    maker:step()
    judge:resume(dir .. "/judge/step-00000001")
    local have_g, have_d = weights(maker:state())
    near(have_g, g, "maker")
    near(have_d, d, "judge")
    maker:step()
    assert.is_true(math.abs(weights(judge:state()) - g) > 1e-4)
  end)
  it("are kept from losing a change between a step's pieces", function()
    local _, judge, maker = make()
    local _, batch = judge:microbatches()()
    judge:forward(batch)
    fails(function() maker:step() end, "engine:step: another engine of the same model is between the forward")
  end)
  it("train what their jobs say, whatever is said later", function()
    local game = make()
    fails(function() game:requires_grad(false) end, "give dt.job { freeze = module }")
    assert.equal(2, game:count())
  end)
  it("freeze what is theirs", function()
    fails(function()
      dt.job { model = Game(), loss = nn.MSE(), freeze = Game(), batch = 4, steps = 1, optimizer = optim.SGD { lr = 1 },
        data = data.synthetic { inputs = { 1 }, targets = { 1 }, samples = 4 } }
    end, "freeze: the parameter 'maker.weight' of entry 1 is no part")
  end)
end)

describe("examples/strategies/two_optimizers.lua", function()
  local function losses(words, ranks)
    local code, text = support.run("examples/strategies/two_optimizers.lua " .. words, { ranks = ranks })
    assert(code == 0, text)
    local lines = {}
    for line in text:gmatch "%d+  judge[^\n]+" do lines[#lines + 1] = line end
    assert.equal(4, #lines)
    return table.concat(lines, "\n")
  end
  local alone
  setup(function() alone = losses "" end)
  for _, how in ipairs { "none", "zero=1", "zero=2", "zero=3", "tensor=2", "pipeline=2" } do
    it("on two ranks equals one process: " .. how, function()
      assert.equal(alone, losses(how == "none" and "" or "--parallel " .. how, 2))
    end)
  end
end)

describe("checkpoints of two engines", function()
  local function run(words, ranks)
    local code, text = support.run("tests/dist/engines.lua --quiet " .. words, { ranks = ranks })
    assert(code == 0, text)
  end
  local want
  setup(function()
    run(("--dir %s/whole --report %s/whole.safetensors"):format(dir, dir))
    want = dt.load(dir .. "/whole.safetensors")
  end)
  for _, c in ipairs { { "data", "", 2 }, { "zero1", "--parallel zero=1", 2 }, { "zero3", "--parallel zero=3", 3 },
    { "tensor", "--parallel tensor=2", 2 } } do
    it("are resumed on other ranks, equal to one run of one process: " .. c[1], function()
      local at = dir .. "/" .. c[1]
      run(("--dir %s --steps 6 %s"):format(at, c[2]), c[3])
      run(("--dir %s --resume auto --report %s.safetensors"):format(at, at))
      run(("--dir %s_back --steps 6"):format(at))
      run(("--dir %s_back --resume auto --report %s_back.safetensors %s"):format(at, at, c[2]), c[3])
      for _, path in ipairs { at, at .. "_back" } do
        for name, t in dt.sorted(dt.load(path .. ".safetensors")) do
          assert.is_true(dt.allclose(t, want[name], { rtol = 2e-5, atol = 2e-6 }), name)
        end
      end
    end)
  end
end)
