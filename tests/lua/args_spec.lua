-- dt.args, the words of the command line and text tools, without any tensor.
local dt = require "dtrain"
local cli = require "dtrain.cli"
local util = require "dtrain.util"

local function words(...)
  cli.words, cli.given, cli.declared = { ... }, {}, {}
end

local function message(f, ...)
  local ok, e = pcall(f, ...)
  assert.is_false(ok)
  return e
end

describe("dt.args", function()
  it("gives the defaults", function()
    words()
    local a = dt.args { lr = 3e-4, layers = 6, name = "x", tied = true }
    assert.are.same({ 3e-4, 6, "x", true }, { a.lr, a.layers, a.name, a.tied })
  end)
  it("reads options in both forms, with types from the defaults", function()
    words("--lr", "1e-3", "--layers=4", "--name", "two words", "--no-tied", "--weight-decay", "0.1")
    local a = dt.args { lr = 3e-4, layers = 6, name = "x", tied = true, weight_decay = 0.0 }
    assert.are.same({ 1e-3, 4, "two words", false, 0.1 }, { a.lr, a.layers, a.name, a.tied, a.weight_decay })
    assert.are.equal("integer", math.type(a.layers))
  end)
  it("leaves dtrain's own options to dtrain", function()
    words("--steps", "12", "--lr", "1", "--quiet")
    assert.are.equal(1, dt.args { lr = 0.5 }.lr)
    local o = cli.options()
    assert.are.same({ 12, true }, { o.steps, o.quiet })
  end)
  it("takes a name that the script declares before dtrain's", function()
    words("--steps", "7")
    assert.are.equal(7, dt.args { steps = 1 }.steps)
    assert.is_nil(cli.options().steps)
  end)
  it("names the nearest option for an unknown one", function()
    words("--presett", "small")
    dt.args { preset = "demo" }
    assert.matches("unknown option %-%-presett; did you mean %-%-preset%?", message(cli.options))
  end)
  it("refuses values of the wrong type", function()
    words("--layers", "2.5")
    assert.matches("wants a whole number, got '2.5'", message(dt.args, { layers = 6 }))
    words("--lr", "fast")
    assert.matches("wants a number", message(dt.args, { lr = 0.1 }))
    words("--lr")
    assert.matches("needs a value", message(dt.args, { lr = 0.1 }))
  end)
  it("knows choices", function()
    words("--preset", "smal")
    assert.matches("did you mean 'small'",
      message(dt.args, { preset = { default = "demo", choices = { "demo", "small" } } }))
  end)
  it("refuses reading what was not declared", function()
    words()
    local a = dt.args { layers = 6 }
    assert.matches("did you mean 'layers'", message(function() return a.layer end))
  end)
  it("refuses defaults that have no type of an option", function()
    words()
    assert.matches("default", message(dt.args, { x = { 1, 2 } }))
  end)
end)

describe("dtrain's options", function()
  it("refuse devices that no build has", function()
    words("--device", "tpu")
    assert.matches("unknown; cpu, cuda and auto work", message(cli.options))
  end)
  it("refuse contradictions and strays", function()
    words("--steps", "3", "--epochs", "1")
    assert.matches("exclude each other", message(cli.options))
    words("stray")
    assert.matches("unexpected 'stray'", message(cli.options))
    words("--steps", "0")
    assert.matches("at least 1", message(cli.options))
  end)
end)

describe("text tools", function()
  it("find the nearest name", function()
    assert.are.equal("weight_decay", util.nearest("weigth_decay", { "lr", "betas", "weight_decay" }))
    assert.are.equal("bias", util.nearest("bais", { "base", "bias" }))
  end)
  it("write JSON", function()
    assert.are.equal('{"step":1,"a":[1.5,2],"b":"x\\"\\n","c":null}',
      util.json({ step = 1, c = 0 / 0, b = 'x"\n', a = { 1.5, 2 } }, { "step" }))
  end)
  it("sort keys of mixed types", function()
    assert.are.same({ 1, 2, "a", "b" }, util.keys { b = 1, [2] = 1, a = 1, [1] = 1 })
  end)
  it("put commas", function()
    assert.are.equal("1,234,567", util.commas(1234567))
    assert.are.equal("-123", util.commas(-123))
    assert.are.equal("123,456", util.commas(123456))
  end)
end)

words()
